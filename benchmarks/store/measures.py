"""The measures: one peer at a time, every one of them with wall time and processor time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.store.data import rollout_rows, score_rows
from benchmarks.store.limits import synced_file
from benchmarks.store.peers import PAYLOAD, Peer, PeerKind, Unsupported

BULK = 2048
SMALL = 64
BATCH = 256
WRITERS = 4
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is done; `quick` is for finding out whether everything works, not for numbers to quote."""

    bulk_commits: int
    small_commits: int
    repeats: int
    scores: int
    writer_commits: int
    watched: int

    @classmethod
    def of(cls, rows: int, *, quick: bool) -> Sizes:
        """For `rows` rows in bulk, rounded up to whole commits."""
        commits = max(1, -(-rows // BULK))
        if quick:
            return cls(commits, 8, 3, min(2000, commits * BULK), 2, 8)
        return cls(commits, 100, 15, min(10_000, commits * BULK), 25, 60)


@dataclass(slots=True)
class Numbers:
    """What was measured of one peer, by measure; a text says why there is no number."""

    kind: PeerKind
    values: dict[str, float | str] = field(default_factory=dict[str, "float | str"])


@dataclass(slots=True)
class _Clock:
    wall: float = 0.0
    cpu: float = 0.0


@contextmanager
def _timed() -> Generator[_Clock]:
    clock = _Clock()
    begin, cpu = time.perf_counter(), time.process_time()
    yield clock
    clock.wall, clock.cpu = time.perf_counter() - begin, time.process_time() - cpu


def measure(kinds: Sequence[PeerKind], folder: Path, sizes: Sizes, say: Callable[[str], None]) -> list[Numbers]:
    """Everything about every peer; what one cannot do or fails at is a text in place of the number.

    Measure by measure, and within one peer by peer: what else the machine does then hits all peers about alike.
    """
    found = [Numbers(kind) for kind in kinds]
    opened: dict[str, Peer] = {}
    for numbers in found:
        kind = numbers.kind
        missing = kind.missing()
        if missing is not None:
            numbers.values["status"] = missing
            continue
        try:
            opened[kind.name] = kind.open(folder / kind.name / "main")
        except Exception as error:  # an optional peer of another version: its row says so, the others are measured
            numbers.values["status"] = f"failed to open: {type(error).__name__}: {error}"
    present = [numbers for numbers in found if numbers.kind.name in opened]
    try:
        for step in (_bulk, _small, _batch, _late_scores, _group_by, _size):
            for numbers in present:
                name, place = numbers.kind.name, folder / numbers.kind.name / "main"
                say(f"{step.__name__.strip('_').replace('_', ' ')}: {numbers.kind.title}")
                work = partial(step, opened[name], place, sizes, numbers.values)
                _attempt(step.__name__, numbers, work)
    finally:
        for peer in opened.values():
            peer.close()
    for step in (_writers, _visible):
        for numbers in present:
            say(f"{step.__name__.strip('_')}: {numbers.kind.title}")
            work = partial(step, numbers.kind, folder / numbers.kind.name, sizes, numbers.values)
            _attempt(step.__name__, numbers, work)
    return found


def _attempt(name: str, numbers: Numbers, work: Callable[[], None]) -> None:
    measure_of = {
        "_bulk": "bulk rows/s", "_small": "64-row commits rows/s", "_batch": "batch of 256 ms",
        "_late_scores": "late scores ms", "_group_by": "group-by ms", "_size": "bytes/row",
        "_writers": "4 writers rows/s", "_visible": "visible p50 ms",
    }  # fmt: skip
    try:
        work()
    except Unsupported as error:
        numbers.values[measure_of[name]] = str(error)
    except Exception as error:  # one broken measure of one peer must not hide all others; it is printed in its place
        numbers.values[measure_of[name]] = f"failed: {type(error).__name__}: {error}"


def _bulk(peer: Peer, folder: Path, sizes: Sizes, values: dict[str, float | str]) -> None:
    del folder
    peer.append(rollout_rows(8, seed=99))  # files, tables and caches exist from here on
    parts = [rollout_rows(BULK, first=BULK * at) for at in range(sizes.bulk_commits)]
    with _timed() as clock:
        for part in parts:
            peer.append(part)
    rows = BULK * sizes.bulk_commits
    values["bulk rows/s"] = rows / clock.wall
    values["bulk CPU µs/row"] = clock.cpu / rows * 1e6


def _small(peer: Peer, folder: Path, sizes: Sizes, values: dict[str, float | str]) -> None:
    parts = [rollout_rows(SMALL, seed=1, first=SMALL * at) for at in range(sizes.small_commits)]
    walls: list[float] = []
    cpu = 0.0
    with synced_file(folder.parent, int(one_row_bytes(parts[0]) * SMALL), len(parts)) as write_and_sync:
        plain: list[float] = []
        for part in parts:
            with _timed() as clock:
                peer.append(part)
            walls.append(clock.wall)
            cpu += clock.cpu
            with _timed() as clock:
                write_and_sync()
            plain.append(clock.wall)
    rows = SMALL * sizes.small_commits
    values["64-row commits rows/s"] = rows / sum(walls)
    values["64-row commit p50 ms"] = float(np.percentile(walls, 50)) * 1e3
    values["64-row commit p99 ms"] = float(np.percentile(walls, 99)) * 1e3
    values["plain write + sync p50 ms"] = float(np.percentile(plain, 50)) * 1e3
    values["plain write + sync p99 ms"] = float(np.percentile(plain, 99)) * 1e3
    values["64-row CPU µs/row"] = cpu / rows * 1e6


def _batch(peer: Peer, folder: Path, sizes: Sizes, values: dict[str, float | str]) -> None:
    del folder
    random = np.random.default_rng(5)
    walls: list[float] = []
    cpu: list[float] = []
    copies: list[float] = []
    for _ in range(sizes.repeats):
        chosen = random.choice(BULK * sizes.bulk_commits, BATCH, replace=False)
        ids = [f"x0-{one:09d}" for one in chosen]
        with _timed() as clock:
            blocks = peer.batch(ids)
        walls.append(clock.wall)
        cpu.append(clock.cpu)
        if set(blocks) == set(PAYLOAD):
            _check_batch(blocks, chosen)
        with _timed() as clock:
            for block in blocks.values():
                block.copy()
        copies.append(clock.wall)
    values["batch of 256 ms"] = float(np.median(walls)) * 1e3
    values["batch CPU ms"] = float(np.median(cpu)) * 1e3
    values["batch / memcpy of it"] = float(np.median(walls) / np.median(copies))


def _check_batch(blocks: dict[str, np.ndarray], chosen: np.ndarray) -> None:
    """A peer that is quick because it returns other rows is no peer: lengths and first row are compared."""
    first = int(chosen[0])
    at = first // BULK * BULK
    row = rollout_rows(BULK, first=at).slice(first - at, 1)
    tokens = row.column("token_ids")[0].as_py()
    if blocks["token_ids"].shape[0] != BATCH or blocks["token_ids"][0, : len(tokens)].tolist() != tokens:
        raise AssertionError("the batch does not hold the rows that were asked for")


def _late_scores(peer: Peer, folder: Path, sizes: Sizes, values: dict[str, float | str]) -> None:
    del folder
    ids = [f"x0-{one:09d}" for one in np.random.default_rng(6).permutation(BULK * sizes.bulk_commits)[: sizes.scores]]
    walls: list[float] = []
    cpu: list[float] = []
    for version in (1, 2, 3):
        scores = score_rows(ids, version=version)
        with _timed() as clock:
            peer.score(scores)
        walls.append(clock.wall)
        cpu.append(clock.cpu)
    values["late scores ms"] = float(np.median(walls)) * 1e3
    values["late scores CPU ms"] = float(np.median(cpu)) * 1e3


def _group_by(peer: Peer, folder: Path, sizes: Sizes, values: dict[str, float | str]) -> None:
    del folder
    found = peer.group_by()
    walls: list[float] = []
    cpu: list[float] = []
    for _ in range(max(3, sizes.repeats // 3)):
        with _timed() as clock:
            found = peer.group_by()
        walls.append(clock.wall)
        cpu.append(clock.cpu)
    rows = 8 + BULK * sizes.bulk_commits + SMALL * sizes.small_commits
    if len(found[0]) == 4 and sum(int(str(row[2])) for row in found) != rows:
        raise AssertionError(f"the groups do not add up to {rows} rows")
    values["group-by ms"] = float(np.median(walls)) * 1e3
    values["group-by CPU ms"] = float(np.median(cpu)) * 1e3


def _size(peer: Peer, folder: Path, sizes: Sizes, values: dict[str, float | str]) -> None:
    del peer
    rows = 8 + BULK * sizes.bulk_commits + SMALL * sizes.small_commits
    # allocated blocks: what is allocated ahead counts, as it does on a disk
    allocated = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    values["bytes/row"] = allocated / rows


def _writers(kind: PeerKind, folder: Path, sizes: Sizes, values: dict[str, float | str]) -> None:
    if not kind.shared:
        raise Unsupported("one process only")
    place = folder / "shared"
    first = kind.open(place)
    first.append(rollout_rows(8, seed=99))
    first.close()
    running = [_start("write", kind, place, 10 + at, sizes.writer_commits, SMALL) for at in range(WRITERS)]
    said = _finish(running)
    rows = WRITERS * sizes.writer_commits * SMALL
    wall = max(float(one["end"]) for one in said) - min(float(one["begin"]) for one in said)
    values["4 writers rows/s"] = rows / wall
    values["4 writers CPU µs/row"] = sum(float(one["cpu"]) for one in said) / rows * 1e6
    peer = kind.open(place)
    try:
        ids = peer.ids()
        wanted = {name for at in range(WRITERS) for name in _ids(10 + at, sizes.writer_commits * SMALL)}
        lost, twice = len(wanted - set(ids)), len(ids) - len(set(ids))
        values["lost / doubled"] = f"{lost} / {twice}"
    except Unsupported as error:
        values["lost / doubled"] = str(error)
    finally:
        peer.close()


def _ids(seed: int, count: int) -> list[str]:
    return [f"x{seed}-{one:09d}" for one in range(count)]


def _visible(kind: PeerKind, folder: Path, sizes: Sizes, values: dict[str, float | str]) -> None:
    if not kind.shared:
        raise Unsupported("one process only")
    place = folder / "seen"
    peer = kind.open(place)
    peer.append(rollout_rows(8, seed=99))
    parts = [rollout_rows(8, seed=50, first=8 * at) for at in range(sizes.watched)]
    watcher = _start("watch", kind, place, 8, sizes.watched)
    _begin([watcher])
    acknowledged: list[float] = []
    for part in parts:
        time.sleep(0.03)
        peer.append(part)
        acknowledged.append(time.monotonic())
    (said,) = _results([watcher])
    peer.close()
    seen: list[float] = said["seen"]
    if len(seen) != sizes.watched:
        raise AssertionError(f"{len(seen)} of {sizes.watched} appends were seen")
    delays = np.maximum(np.array(seen) - np.array(acknowledged), 0) * 1e3
    values["visible p50 ms"] = float(np.percentile(delays, 50))
    values["visible p99 ms"] = float(np.percentile(delays, 99))


def _start(work: str, kind: PeerKind, folder: Path, *numbers: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "benchmarks.store.process", work, kind.name, str(folder), *map(str, numbers)]
    return subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _finish(running: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    _begin(running)
    return _results(running)


def _begin(running: list[subprocess.Popen[str]]) -> None:
    for one in running:
        while one.stdout.readline().strip() != "ready":  # type: ignore[union-attr]
            if one.poll() is not None:
                raise RuntimeError(f"a process ended with {one.returncode} before it began")
    for one in running:
        one.stdin.write("go\n")  # type: ignore[union-attr]
        one.stdin.flush()  # type: ignore[union-attr]


def _results(running: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    for one in running:
        out, _ = one.communicate(timeout=300)
        if one.returncode != 0:
            raise RuntimeError(f"a process ended with {one.returncode}")
        said.append(json.loads(out.splitlines()[-1]))
    return said


def one_row_bytes(rows: pa.Table) -> float:
    """Raw bytes of a row in memory."""
    return rows.nbytes / rows.num_rows
