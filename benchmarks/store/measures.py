"""The measures: one peer at a time, every one of them with wall time and processor time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.store.data_files import BATCH, BULK, FIRST, SMALL, WRITERS, DataFiles, Sizes
from benchmarks.store.peers import PeerKind, Unsupported
from benchmarks.store.process import Process


@dataclass(slots=True)
class Numbers:
    """What was measured of one peer, by measure.

    Attributes:
        values: a number, or a text that says why there is none.
        cuts: of numbers that rest on less than was asked: on how much, and why.
        status: why nothing was measured at all; empty otherwise.
        rows: rollouts it holds by now.
        bulk_rows: of those, the ones appended in bulk.
    """

    kind: PeerKind
    values: dict[str, float | str] = field(default_factory=dict[str, "float | str"])
    cuts: dict[str, str] = field(default_factory=dict[str, str])
    status: str = ""
    rows: int = 0
    bulk_rows: int = 0


@dataclass(frozen=True, slots=True)
class Bench:
    """What all measures share."""

    data: DataFiles
    sizes: Sizes
    folder: Path
    say: Callable[[str], None]


Step = Callable[[Process, Numbers, Bench], None]


def measure(kinds: Sequence[PeerKind], bench: Bench) -> list[Numbers]:
    """Everything about every peer; what one cannot do or fails at is a text in place of the number.

    Measure by measure, and within one peer by peer: what else the machine does then hits all peers about alike. Peers
    that keep the machine busy while they are open are measured afterwards, each by itself.
    """
    found = [Numbers(kind, status=kind.missing() or "") for kind in kinds]
    able = [numbers for numbers in found if not numbers.status]
    _together([numbers for numbers in able if not numbers.kind.alone], bench)
    for numbers in able:
        if numbers.kind.alone:
            _together([numbers], bench)
    return found


def _together(company: list[Numbers], bench: Bench) -> None:
    opened: list[tuple[Process, Numbers]] = []
    try:
        for numbers in company:
            try:
                process = Process(numbers.kind, bench.folder / numbers.kind.name / "main")
            except (RuntimeError, Unsupported) as error:
                numbers.status = f"failed to open: {error}"
                continue
            opened.append((process, numbers))
        for name, step in _STEPS:
            for process, numbers in opened:
                bench.say(f"{name}: {numbers.kind.title}")
                _attempt(name, numbers, step, process, bench)
        for process, numbers in opened:
            numbers.values["memory at start MB"] = process.start_bytes / 1e6
            numbers.values["peak memory MB"] = process.peak_bytes / 1e6
    finally:
        for process, _ in opened:
            process.close()
    for name, several in _WITH_SEVERAL:
        for numbers in company:
            if numbers.status:
                continue
            bench.say(f"{name}: {numbers.kind.title}")
            try:
                if not numbers.kind.shared:
                    raise Unsupported("one process only")
                several(numbers, bench)
            except Unsupported as error:
                numbers.values[name] = str(error)
            except (RuntimeError, AssertionError) as error:
                numbers.values[name] = f"failed: {error}"


def _attempt(name: str, numbers: Numbers, step: Step, process: Process, bench: Bench) -> None:
    try:
        step(process, numbers, bench)
    except Unsupported as error:
        numbers.values[name] = str(error)
    except (RuntimeError, AssertionError, BrokenPipeError) as error:  # it must not hide all other measures
        numbers.values[name] = f"failed: {error}"


def _bulk(process: Process, numbers: Numbers, bench: Bench) -> None:
    process.ask("append", files=[bench.data.first])
    said = process.ask("append", files=bench.data.bulk, budget=bench.sizes.budget)
    numbers.rows, numbers.bulk_rows = FIRST + said["rows"], said["rows"]
    _cut(numbers, ("bulk rows/s", "bulk CPU µs/row"), said)
    numbers.values["bulk rows/s"] = said["rows"] / sum(said["walls"])
    numbers.values["bulk CPU µs/row"] = sum(said["cpus"]) / said["rows"] * 1e6


def _small(process: Process, numbers: Numbers, bench: Bench) -> None:
    said = process.ask("append", files=bench.data.small, budget=bench.sizes.budget, disk=True)
    numbers.rows += said["rows"]
    names = (
        "64-row commits rows/s", "64-row commit p50 ms", "64-row commit p99 ms", "64-row CPU µs/row",
        "64-row CPU p50 ms", "64-row CPU p99 ms",
    )  # fmt: skip
    _cut(numbers, names, said)
    values = numbers.values
    values[names[0]] = said["rows"] / sum(said["walls"])
    values[names[1]], values[names[2]] = _percentiles(said["walls"])
    values[names[3]] = sum(said["cpus"]) / said["rows"] * 1e6
    values[names[4]], values[names[5]] = _percentiles(said["cpus"])
    values["plain write + sync p50 ms"], values["plain write + sync p99 ms"] = _percentiles(said["plain"])
    values["plain write + sync rows/s"] = said["rows"] / sum(said["plain"])


def _objects(process: Process, numbers: Numbers, bench: Bench) -> None:
    said = process.ask("append", files=bench.data.objects, objects=True, budget=bench.sizes.budget)
    numbers.rows += said["rows"]
    _cut(numbers, ("64 objects rows/s", "64 objects CPU µs/row"), said)
    numbers.values["64 objects rows/s"] = said["rows"] / sum(said["walls"])
    numbers.values["64 objects CPU µs/row"] = sum(said["cpus"]) / said["rows"] * 1e6


def _batch(process: Process, numbers: Numbers, bench: Bench) -> None:
    chosen = _chosen(numbers.bulk_rows, bench.sizes.repeats)
    said = process.ask("batch", batches=[[f"x0-{one:09d}" for one in batch] for batch in chosen])
    if said["firsts"][-1] is not None:
        _check_first(said["firsts"][-1], bench.data.tokens_of(int(chosen[-1][0])))
    values = numbers.values
    values["batch of 256 p50 ms"], values["batch of 256 p99 ms"] = _percentiles(said["walls"])
    values["batch CPU ms"] = float(np.median(said["cpus"])) * 1e3
    values["batch / memcpy of it"] = float(np.median(said["walls"]) / np.median(said["copies"]))
    values["memcpy of a batch p50 ms"], values["memcpy of a batch p99 ms"] = _percentiles(said["copies"])


def _late(process: Process, numbers: Numbers, bench: Bench) -> None:
    said = process.ask("score", files=bench.data.scores[:3])
    numbers.values["late scores ms"] = float(np.median(said["walls"])) * 1e3
    numbers.values["late scores CPU ms"] = float(np.median(said["cpus"])) * 1e3


def _group_by(process: Process, numbers: Numbers, bench: Bench) -> None:
    said = process.ask("group_by", repeats=max(3, bench.sizes.repeats // 3))
    _check_groups(said["rows"], numbers.rows)
    numbers.values["group-by ms"] = float(np.median(said["walls"])) * 1e3
    numbers.values["group-by CPU ms"] = float(np.median(said["cpus"])) * 1e3


def _size(process: Process, numbers: Numbers, bench: Bench) -> None:
    del bench
    if numbers.kind.alone:
        raise Unsupported("RAM only")
    numbers.values["bytes/row"] = allocated(process.folder) / numbers.rows


def _compacted(process: Process, numbers: Numbers, bench: Bench) -> None:
    said = process.ask("compact")
    values = numbers.values
    values["compaction CPU µs/row"] = said["cpu"] / numbers.rows * 1e6
    values["compacted bytes/row"] = allocated(process.folder) / numbers.rows
    values["compacted bytes/trainable token"] = values["compacted bytes/row"] / bench.data.trainable_tokens
    found = process.ask("group_by", repeats=max(3, bench.sizes.repeats // 3))
    _check_groups(found["rows"], numbers.rows)
    values["compacted group-by ms"] = float(np.median(found["walls"])) * 1e3
    chosen = _chosen(numbers.bulk_rows, 3)
    read = process.ask("batch", batches=[[f"x0-{one:09d}" for one in batch] for batch in chosen])
    if read["firsts"][-1] is not None:
        _check_first(read["firsts"][-1], bench.data.tokens_of(int(chosen[-1][0])))
    values["compacted batch of 256 ms"] = float(np.median(read["walls"])) * 1e3


def _reward(process: Process, numbers: Numbers, bench: Bench) -> None:
    said = process.ask("score", files=bench.data.scores[3:], change=True)
    numbers.values["change rewards ms"] = said["walls"][-1] * 1e3  # the first one adds the column
    numbers.values["change rewards CPU ms"] = said["cpus"][-1] * 1e3


_STEPS: tuple[tuple[str, Step], ...] = (
    ("bulk rows/s", _bulk),
    ("64-row commits rows/s", _small),
    ("64 objects rows/s", _objects),
    ("batch of 256 p50 ms", _batch),
    ("late scores ms", _late),
    ("group-by ms", _group_by),
    ("bytes/row", _size),
    ("compacted bytes/row", _compacted),
    ("change rewards ms", _reward),
)
"""The measure that shows when a step has no number, and the step."""


def _writers(numbers: Numbers, bench: Bench) -> None:
    place = bench.folder / numbers.kind.name / "shared"
    with Process(numbers.kind, place) as first:
        first.ask("append", files=[bench.data.first])
        running = [Process(numbers.kind, place) for _ in range(WRITERS)]
        try:
            for process, files in zip(running, bench.data.writers, strict=True):
                process.ask("load", files=files)
            for process in running:
                process.send("append_loaded", budget=bench.sizes.budget)
            said = [process.answer() for process in running]
        finally:
            for process in running:
                process.close()
        rows = SMALL * sum(int(one["done"]) for one in said)
        wall = max(float(one["end"]) for one in said) - min(float(one["begin"]) for one in said)
        names = ("4 writers rows/s", "4 writers CPU µs/row")
        if rows < SMALL * WRITERS * bench.sizes.writer_commits:
            asked = WRITERS * bench.sizes.writer_commits
            numbers.cuts |= dict.fromkeys(names, f"{rows // SMALL} of {asked} commits in {bench.sizes.budget:.0f} s")
        numbers.values[names[0]] = rows / wall
        numbers.values[names[1]] = sum(float(one["cpu"]) for one in said) / rows * 1e6
        try:
            ids = [one for one in first.ask("ids")["ids"] if not one.startswith("x99-")]
        except Unsupported as error:
            numbers.values["lost / doubled"] = str(error)
            return
    wanted = {f"x{10 + at}-{row:09d}" for at, one in enumerate(said) for row in range(SMALL * int(one["done"]))}
    numbers.values["lost / doubled"] = f"{len(wanted - set(ids))} / {len(ids) - len(set(ids))}"


def _trainers(numbers: Numbers, bench: Bench) -> None:
    place = bench.folder / numbers.kind.name / "trained"
    files = bench.data.bulk[:4]
    rows = len(files) * BULK
    with Process(numbers.kind, place) as first:
        first.ask("append", files=files)
        first.ask("keep", ids=[f"x0-{one:09d}" for one in range(rows)])
        running = [Process(numbers.kind, place) for _ in range(WRITERS)]
        try:
            for at, process in enumerate(running):
                process.send("take", rows=SMALL, times=rows // SMALL // WRITERS, who=f"trainer{at}")
            said = [process.answer() for process in running]
        finally:
            for process in running:
                process.close()
    values = numbers.values
    walls = [wall for one in said for wall in one["walls"]]
    values["take 64 rows, 4 trainers p50 ms"], values["take 64 rows, 4 trainers p99 ms"] = _percentiles(walls)
    taken = [name for one in said for name in one["taken"]]
    values["not taken / taken twice"] = f"{rows - len(set(taken))} / {len(taken) - len(set(taken))}"


def _visible(numbers: Numbers, bench: Bench) -> None:
    place = bench.folder / numbers.kind.name / "seen"
    with Process(numbers.kind, place) as writer:
        writer.ask("append", files=[bench.data.first])
        with Process(numbers.kind, place) as watcher:
            watcher.ask("watch", step=FIRST, commits=bench.sizes.watched)
            time.sleep(0.1)
            acknowledged = writer.ask("slow_append", files=bench.data.watched, pause=0.03)["acknowledged"]
            seen = watcher.answer()["seen"]
    if len(seen) != bench.sizes.watched:
        raise AssertionError(f"{len(seen)} of {bench.sizes.watched} appends were seen within a minute")
    delays = np.maximum(np.array(seen) - np.array(acknowledged), 0)
    numbers.values["visible p50 ms"], numbers.values["visible p99 ms"] = _percentiles(delays)


_WITH_SEVERAL: tuple[tuple[str, Callable[[Numbers, Bench], None]], ...] = (
    ("4 writers rows/s", _writers),
    ("take 64 rows, 4 trainers p50 ms", _trainers),
    ("visible p50 ms", _visible),
)


def allocated(folder: Path) -> int:
    """Bytes of allocated blocks: what is allocated ahead counts, as it does on a disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _chosen(rows: int, count: int) -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [random.choice(rows, BATCH, replace=False) for _ in range(count)]


def _percentiles(seconds: Iterable[float]) -> tuple[float, float]:
    values = np.asarray(list(seconds)) * 1e3
    return float(np.percentile(values, 50)), float(np.percentile(values, 99))


def _cut(numbers: Numbers, names: Iterable[str], said: dict[str, Any]) -> None:
    done, asked = len(said["walls"]), said["asked"]
    if done < asked:
        numbers.cuts |= dict.fromkeys(names, f"{done} of {asked} commits in {sum(said['walls']):.0f} s")


def _check_first(found: list[int], tokens: list[int]) -> None:
    """A peer that is quick because it returns other rows is no peer."""
    if found[: len(tokens)] != tokens or any(found[len(tokens) :]):
        raise AssertionError("the batch does not hold the rows that were asked for")


def _check_groups(found: int | None, rows: int) -> None:
    if found is not None and found != rows:
        raise AssertionError(f"the groups add up to {found:,} rows and {rows:,} are stored")
