"""What compaction saves and costs: bytes, processor time, reads before and after, and steps with housekeeping beside.

    python -m benchmarks.compaction --rows 2000 --steps 120

Rows are those of `tests/cold_rows.py`: about 1,000 token ids by Zipf's law, texts to match, float32 log-probabilities.
A step appends 64 rows in eight appends, keeps three quarters of them, reserves 32, reads their tensors' columns,
prepares and commits; between steps the main thread sleeps as long as a step took, as one that waits for a device does.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from buffer_engine.store import open_store
from buffer_engine.store.base import ReadPolicy
from buffer_engine.store.local import LocalStore
from pipelines.batches import PAYLOAD
from pipelines.housekeeping import CompactSection, Housekeeper

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from cold_rows import realistic
from store_rows import decisions, manifest

GROUP = 2
POLICY = ReadPolicy.model_validate({"rows": 32})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000, help="rows of the store whose bytes and reads are measured")
    parser.add_argument("--steps", type=int, default=120, help="steps with and without housekeeping")
    parser.add_argument("--every", type=int, default=10, help="steps between two turns of housekeeping")
    given = parser.parse_args()
    for share in (1 / 3, 1 / 10):
        print(f"prompts are {share:.0%} of the tokens")
        sizes_and_reads(realistic(range(given.rows), prompt_share=share))
    rows = realistic(range(64 * given.steps // 8), seed=1)
    for name, every in (("without", None), (f"every {given.every} steps", given.every), ("without", None)):
        steps_with(rows, given.steps, name, every)


def sizes_and_reads(rows: pa.Table) -> None:
    """Bytes and read times of one store before and after everything is compacted."""
    with tempfile.TemporaryDirectory() as folder:
        with open_store(folder, durability="process") as store:
            for start in range(0, rows.num_rows, 64):
                store.append("rollouts", rows.slice(start, 64))
        with open_store(folder, durability="process") as store:
            tell(store, "as appended")
            start = time.process_time()
            done = store.compact(everything=True, grace_seconds=0)
            spent = time.process_time() - start
            print(f"compaction: {done.bytes_before / spent / 1e6:,.0f} MB a second of processor time")
            tell(store, "in Parquet")


def tell(store: LocalStore, name: str) -> None:
    """Sizes, and processor time of reading 256 random rows and one narrow column."""
    found = store.info(tokens=True)
    chooser = random.Random(5)
    count = found.rows["rollouts"]

    def some() -> None:
        store.fetch([f"x{chooser.randrange(count)}" for _ in range(256)], columns=list(PAYLOAD))

    print(
        f"{name}: {found.bytes_per_row:,.0f} bytes a row, {found.bytes_per_trainable_token:,.2f} a trainable token; "
        f"256 random rows {cpu(some, 1):.1f} ms at first, {cpu(some, 25):.1f} ms then; one narrow column of all rows "
        f"{cpu(lambda: store.table('rollouts', columns=['stop_reason']), 15):.2f} ms"
    )


def cpu(action: Callable[[], None], times: int) -> float:
    """Median processor time of an action in milliseconds."""
    spent: list[float] = []
    for _ in range(times):
        start = time.process_time()
        action()
        spent.append(time.process_time() - start)
    return statistics.median(spent) * 1000


def steps_with(rows: pa.Table, steps: int, name: str, every: int | None) -> None:
    """Times of a run's steps with housekeeping every so many steps (None: without)."""
    compact = None if every is None else CompactSection.model_validate({"every_steps": every, "grace_seconds": 0})
    wall: list[float] = []
    thread: list[float] = []
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder, open_store(folder, durability="process") as store:
        with Housekeeper(store, Path(folder), "run", compact=compact, retain=(), max_uses=1) as keeper:
            for step in range(1, steps + 1):
                start, at = time.perf_counter(), time.thread_time()
                one_step(store, rows, step)
                keeper.after_step(step)
                wall.append(time.perf_counter() - start)
                thread.append(time.thread_time() - at)
                time.sleep(wall[-1])
        total = time.process_time() - began
        size = store.info().bytes["rollouts"] / store.info().rows["rollouts"]
    worst = sorted(wall)[int(0.99 * len(wall))]
    print(
        f"{steps} steps, housekeeping {name}: step median {statistics.median(wall) * 1000:.1f} ms, p99 "
        f"{worst * 1000:.1f} ms; the loop's own processor time {statistics.median(thread) * 1000:.1f} ms a step, all "
        f"threads {total / steps * 1000:.1f} ms; {size:,.0f} bytes a row at the end"
    )


def one_step(store: LocalStore, rows: pa.Table, step: int) -> None:
    """Append, decide, reserve, read, prepare, commit."""
    first = 64 * (step - 1)
    for part in range(8):
        numbers = range(first + 8 * part, first + 8 * part + 8)
        given = rows.slice((8 * (step - 1) + part * 8) % (rows.num_rows - 8), 8)
        store.append("rollouts", renamed(given, numbers))
    kept = [number for number in range(first, first + 64) if number // GROUP % 4]
    store.append("decisions", decisions(kept))
    store.append("decisions", decisions(sorted(set(range(first, first + 64)) - set(kept)), "reject"))
    reserved = store.reserve(POLICY, run_id="run", batch_id=f"run/{step}", model_version=step - 1)
    assert reserved is not None
    store.fetch(reserved.experience_ids, columns=list(PAYLOAD))
    batch, members = manifest(reserved.batch_id, step, reserved.experience_ids)
    store.prepare_batch(reserved, step=step, batch=batch, rows=members)
    store.commit_batch(reserved.batch_id, step=step)


def renamed(rows: pa.Table, numbers: range) -> pa.Table:
    """The same payload as other rollouts."""
    changes = {
        "experience_id": [f"x{number}" for number in numbers],
        "task_id": [f"t{number // GROUP}" for number in numbers],
        "group_id": [f"g{number // GROUP}" for number in numbers],
        "sample_index": pa.array([number % GROUP for number in numbers], pa.int32()),
    }
    for name, values in changes.items():
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, rows.schema.field(name), pa.chunked_array([values]))
    return rows


if __name__ == "__main__":
    main()
