"""What the processes of the fault suite do to one store, each logging what it was promised.

A role goes on until the file `stop` appears beside its log, or until it dies. It may be told to die by its own hand: at
its n-th call of a C function, or before or after its n-th call of a named step of the store. A promise is one line
written with one `write` call, so it survives the death of the process. Whoever plays the role again goes on from what
the store says.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from store_rows import decisions, manifest, model, rollout, rollouts, score, table
from store_workload import Acknowledgements, die_after

from buffer_engine.errors import StoreBusyError, StoreError
from buffer_engine.store import LocalStore, open_store
from buffer_engine.store.append import Appender
from buffer_engine.store.base import ReadPolicy
from buffer_engine.store.catalog import Catalog
from buffer_engine.store.files import LocalFiles
from buffer_engine.store.layout import StoreLayout
from buffer_engine.store.object_writer import ObjectWriter
from buffer_engine.store.objects import ObjectFiles
from buffer_engine.store.postgres_catalog import PostgresCatalog
from buffer_engine.store.segments import SegmentWriter

GROUP = 2
ROUND = 4
"""Rows of one append of a writer."""
LEASE_SECONDS = 1.0
RUN = "run"

POINTS: dict[str, tuple[Any, str]] = {
    "begin a segment": (SegmentWriter, "ensure"),
    "write a frame": (SegmentWriter, "write"),
    "sync": (SegmentWriter, "sync"),
    "list frames": (Appender, "record"),
    "transaction": (Catalog, "transaction"),
    "publish a file": (LocalFiles, "publish"),
    "remove a file": (LocalFiles, "remove"),
}
"""Steps of the store before or after which a process may be told to die."""

SHARED_POINTS: dict[str, tuple[Any, str]] = {
    "write a frame": (ObjectWriter, "write"),
    "sync": (ObjectWriter, "sync"),
    "list frames": (Appender, "record"),
    "transaction": (PostgresCatalog, "transaction"),
    "publish a file": (ObjectFiles, "publish"),
    "remove a file": (ObjectFiles, "remove"),
}
"""The same where the store is shared."""


def points_in(folder: Path | str) -> dict[str, tuple[Any, str]]:
    """The steps of the store in a folder."""
    return SHARED_POINTS if StoreLayout(Path(folder)).addresses.exists() else POINTS


def points_of(role: str, folder: Path) -> list[str]:
    """Steps that a role comes through often."""
    files = ["publish a file", "remove a file"]
    return ["transaction", *files] if role == "compactor" else sorted(set(points_in(folder)) - set(files))


@dataclass(frozen=True, slots=True)
class Death:
    """How a process ends by its own hand.

    Attributes:
        calls: at this many calls of C functions; 0: not so.
        point: name in `POINTS`; empty: not so. `count` and `after` say at which call of it.
    """

    calls: int = 0
    point: str = ""
    count: int = 1
    after: bool = False


NEVER = Death()


def open_for_test(path: Path | str, *, read_only: bool = False) -> LocalStore:
    """The store under test; every process of the suite opens it here, once the harness has made it."""
    return open_store(path, durability="process", read_only=read_only)


def play(role: str, number: int, folder: str, logs: str, death: Death, pause: float) -> None:
    """Play a role until the file `stop` is there. `pause`: seconds between two turns."""
    _arm(death, folder)
    log = Path(logs)
    done = Acknowledgements(log / f"{role}-{number}.log")
    try:
        with open_for_test(folder, read_only=role == "reader") as store:
            turn = ROLES[role](store, done, number)
            while not (log / "stop").exists():
                turn()
                time.sleep(pause)
    except BaseException:
        (log / f"{role}-{number}.error").write_text(traceback.format_exc())  # for whoever reads the test's failure
        raise
    done.say("stopped")


def _arm(death: Death, folder: str) -> None:
    if death.calls:
        die_after(death.calls)
    if death.point:
        owner, name = points_in(folder)[death.point]
        real: Callable[..., Any] = getattr(owner, name)
        left = death.count

        def dying(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and not death.after:
                os.kill(os.getpid(), signal.SIGKILL)
            if left == 0 and name == "transaction":
                return _dies_after(real(*arguments, **options))
            result = real(*arguments, **options)
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, dying)


class _dies_after:
    """A context whose process dies once it has been left."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> Any:
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._context.__exit__(*error)
        os.kill(os.getpid(), signal.SIGKILL)


def numbers_of(writer: int, turn: int) -> range:
    """Numbers of the rollouts that a writer appends in a turn."""
    start = 10_000_000 * (writer + 1) + turn * ROUND
    return range(start, start + ROUND)


def writer(store: LocalStore, done: Acknowledgements, number: int) -> Callable[[], None]:
    """Appends whole groups and a score for each row, and moves its cursor in the same transaction."""
    cursor = f"writer/{number}"
    last = store.cursor(cursor) - 1
    if last >= 0:  # whether or not it was acknowledged, saying it again must change nothing
        receipt = store.append("rollouts", rollouts(numbers_of(number, last)), cursors={cursor: last + 1})
        assert receipt.appended == {"rollouts": 0}, receipt

    def turn() -> None:
        at = store.cursor(cursor)
        numbers = numbers_of(number, at)
        scores = table("scores", [score(f"x{one}", float(one % 7)) for one in numbers])
        store.append_all({"rollouts": rollouts(numbers), "scores": scores}, cursors={cursor: at + 1})
        done.say("rows", *numbers)

    return turn


def operator(store: LocalStore, done: Acknowledgements, _: int) -> Callable[[], None]:
    """Keeps every new row; one row in 16 groups is rejected, with its sibling kept."""

    def turn() -> None:
        new = [int(one[1:]) for one in store.rollout_state(status="new").column("experience_id").to_pylist()[:64]]
        if not new:
            return
        bad = [number for number in new if number % (16 * GROUP) == 0]
        good = [number for number in new if number % (16 * GROUP)]
        verdicts = [decisions(good)] if good else []
        verdicts += [decisions(bad, "reject")] if bad else []
        store.append("decisions", pa.concat_tables(verdicts))
        done.say("kept", *good)
        done.say("rejected", *bad)

    return turn


def trainer(store: LocalStore, done: Acknowledgements, number: int) -> Callable[[], None]:
    """Reserves, writes the manifest, trains (which takes no time here) and commits, batch after batch.

    A batch that the last process prepared is committed first, as a resumed run replays it.
    """
    mine = f"t{number}-"
    for record in store.batches(RUN):
        if record.status == "prepared" and record.batch_id.startswith(mine):
            assert record.step is not None
            _commit(store, done, record.batch_id, record.step, number)
    policy = ReadPolicy.model_validate({"rows": 8, "type": "fifo" if number % 2 == 0 else "uniform", "seed": 7})

    def turn() -> None:
        step = 1 + max(
            (record.step or 0 for record in store.batches(RUN) if record.batch_id.startswith(mine)), default=0
        )
        held = store.reserve(
            policy, run_id=RUN, batch_id=f"{mine}{step}", model_version=step - 1, lease_seconds=LEASE_SECONDS
        )
        if held is None:
            return
        payload = store.fetch(held.experience_ids, columns=["token_ids"])
        assert payload.column("token_ids")[0].as_py()[0] == int(held.experience_ids[0][1:])
        now = datetime.now(UTC)
        batch, rows = manifest(held.batch_id, step, held.experience_ids, run_id=f"trainer/{number}", created_at=now)
        try:
            store.prepare_batch(held, step=step, batch=batch, rows=rows)
        except StoreError as error:  # on a busy machine a lease of one second may run out before it is used
            if not re.search("expired|is released", str(error)):
                raise
            return
        done.say("prepared", held.batch_id)
        _commit(store, done, held.batch_id, step, number)

    return turn


def _commit(store: LocalStore, done: Acknowledgements, batch_id: str, step: int, number: int) -> None:
    store.commit_batch(batch_id, step=step, model=model(step, run_id=f"trainer/{number}"))
    done.say("committed", batch_id)


def reader(store: LocalStore, done: Acknowledgements, number: int) -> Callable[[], None]:
    """Looks at one version at a time: nothing is gone, nothing is there twice, rows say what was written."""
    seen: set[str] = set()
    version = 0
    dice = random.Random(number)

    def turn() -> None:
        nonlocal seen, version
        with store.snapshot() as now:
            assert now >= version
            ids: list[str] = store.table("rollouts", columns=["experience_id"]).column(0).to_pylist()
            state = store.rollout_state()
            batches = store.batch_state()
            members = store.table("batch_rows", columns=["batch_id", "experience_id"])
        version = now
        assert len(set(ids)) == len(ids), "a row is there twice"
        assert seen <= set(ids), "a row that was there is gone"
        assert set(state.column("experience_id").to_pylist()) == set(ids), "index and rows disagree"
        committed = batches.filter(pc.equal(batches.column("status"), "committed")).column("batch_id").combine_chunks()
        trained = members.filter(pc.is_in(members.column("batch_id"), value_set=committed))
        rows: list[str] = trained.column("experience_id").to_pylist()
        assert len(set(rows)) == len(rows), "a row was trained twice"
        assert sum(state.column("uses").to_pylist()) == len(rows), "uses and committed batches disagree"
        for one in dice.sample(ids, min(3, len(ids))):
            (row,) = store.fetch([one]).to_pylist()
            assert row == rollout(int(one[1:])), "a row says something else than was written"
        seen = set(ids)
        done.say("looked", now)

    return turn


def compactor(store: LocalStore, done: Acknowledgements, _: int) -> Callable[[], None]:
    """Moves frames into Parquet files, merges those, and removes the old files almost at once."""

    def turn() -> None:
        try:
            moved = store.compact(everything=True, grace_seconds=0.2)
        except StoreBusyError:
            return  # the one before is not quite dead, or another process compacts
        done.say("compacted", moved.rows)
        assert not moved.damaged
        time.sleep(0.05)

    return turn


ROLES: dict[str, Callable[[LocalStore, Acknowledgements, int], Callable[[], None]]] = {
    "writer": writer,
    "operator": operator,
    "trainer": trainer,
    "reader": reader,
    "compactor": compactor,
}


def promised(logs: Path, word: str) -> list[str]:
    """Everything that processes were told under `word`, in the order of each log."""
    found: list[str] = []
    for path in sorted(logs.glob("*.log")):
        for line in path.read_text().splitlines():
            said, *rest = line.split()
            if said == word:
                found += rest
    return found


def drain(folder: Path, logs: Path, trainers: Sequence[int]) -> None:
    """Finish in this process what was begun: verdicts for new rows, then batches until nothing is left."""
    done = Acknowledgements(logs / "drain.log")
    with open_for_test(folder) as store:
        turn = operator(store, done, 0)
        while store.rollout_state(status="new").num_rows:
            turn()
        for number in trainers:
            trainer(store, done, number)  # replays what it had prepared
        turn = trainer(store, done, trainers[0])
        while True:
            before = _with_status(store, "committed")
            turn()
            if _with_status(store, "reserved"):
                time.sleep(LEASE_SECONDS)  # its trainer is dead; the next reservation frees its rows
            elif _with_status(store, "committed") == before:
                return


def _with_status(store: LocalStore, status: str) -> int:
    return sum(record.status == status for record in store.batches(RUN))


if __name__ == "__main__":
    sys.exit("these roles are played by tests/fault_harness.py")
