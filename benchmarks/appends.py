"""What appends and late scores cost: processor and elapsed time of durable commits, beside the disk's own pace.

    python -m benchmarks.appends --rows 8192

Rows are those of `benchmarks.heavy_rows`. `--writers 4` has several processes append to one store at once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.heavy_rows import heavy_rollouts, rollout
from buffer_engine.schema import ROLLOUTS, SCORES
from buffer_engine.store import open_store
from buffer_engine.store.base import Durability

NARROW = {"messages": [], "token_ids": [1], "loss_mask": [True], "logprobs": [-1.0]}


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Processor and elapsed milliseconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return (time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3


def show(name: str, times: Sequence[tuple[float, float]], rows: int) -> None:
    """One line of the table."""
    cpu, wall = (np.array(column) for column in zip(*times, strict=True))
    p50, p99 = np.percentile(wall, [50, 99])
    print(
        f"| {name} | {np.median(cpu):.2f} | {p50:.2f} | {p99:.2f} | {wall.max():.2f} | "
        f"{rows * len(times) / wall.sum() * 1e3:,.0f} |",
        flush=True,
    )


def disk_pace(folder: Path, size: int) -> float:
    """Bytes a second of writing `size` bytes in pieces of 1 MiB with one fdatasync at the end."""
    data = os.urandom(1 << 20)
    handle = os.open(folder / "pace", os.O_CREAT | os.O_WRONLY)
    begun = time.perf_counter()
    for _ in range(max(size >> 20, 1)):
        os.write(handle, data)
    os.fdatasync(handle)
    seconds = time.perf_counter() - begun
    os.close(handle)
    os.unlink(folder / "pace")
    return size / seconds


def appends(folder: Path, rows: int, commit: int, durability: Durability) -> tuple[list[tuple[float, float]], int]:
    """Times of commits of `commit` rows each, and bytes of a row."""
    tables = [heavy_rollouts(first, commit) for first in range(0, rows, commit)]
    with open_store(folder, durability=durability) as store:
        store.append("rollouts", heavy_rollouts(rows, 64))  # the first begins files
        times = [timed(lambda table=table: store.append("rollouts", table)) for table in tables]
        info = store.info()
    return times, info.bytes["rollouts"] // info.rows["rollouts"]


def narrow_rollouts(first: int, count: int) -> pa.Table:
    """Rollouts of one token without text."""
    base = rollout(0) | NARROW
    own = {
        "experience_id": [f"run/t{n // 8}/g{n // 8}/{n % 8}/0-{n:08d}" for n in range(first, first + count)],
        "group_id": [f"g{n // 8}" for n in range(first, first + count)],
        "task_id": [f"t{n // 8}" for n in range(first, first + count)],
        "group_size": [8] * count,
        "sample_index": [n % 8 for n in range(first, first + count)],
    }
    columns = [pa.array(own.get(field.name, [base[field.name]] * count), field.type) for field in ROLLOUTS.schema]
    return pa.Table.from_arrays(columns, schema=ROLLOUTS.schema)


def late_scores(ids: Sequence[str], version: int) -> pa.Table:
    """One score for each of the ids."""
    count = len(ids)
    own = {"experience_id": list(ids), "value": np.random.default_rng(version).random(count)}
    base = {"name": "judge", "weight": 1.0, "source": "judge", "author": "judge", "version": version, "run_id": "run",
            "scored_at": 0, "comment": None}  # fmt: skip
    columns = [
        pa.array(own[field.name] if field.name in own else [base[field.name]] * count, field.type)
        for field in SCORES.schema
    ]
    return pa.Table.from_arrays(columns, schema=SCORES.schema)


def scores(folder: Path, stored: int, keys: int, rounds: int) -> list[tuple[float, float]]:
    """Times of scoring `keys` of 40,000 rollouts, in a store that has `stored` scores before."""
    rollouts = [narrow_rollouts(first, 4000) for first in range(0, 40_000, 4000)]
    ids = np.array([one for table in rollouts for one in table.column("experience_id").to_pylist()])
    with open_store(folder) as store:
        for table in rollouts:
            store.append("rollouts", table)
        version = 0
        while stored > 0:
            version += 1
            store.append("scores", late_scores(ids[: min(stored, len(ids))].tolist(), version))
            stored -= len(ids)
        random = np.random.default_rng(0)
        tables = [late_scores(random.permutation(ids)[:keys].tolist(), version + 1 + at) for at in range(rounds)]
        return [timed(lambda table=table: store.append("scores", table)) for table in tables]


def write_as(folder: str, writer: int, rows: int, start: float) -> list[float]:
    """One writer process: elapsed milliseconds of each of its commits of 64 rows."""
    tables = [heavy_rollouts(writer * 1_000_000 + first, 64) for first in range(0, rows, 64)]
    with open_store(folder) as store:
        store.append("rollouts", heavy_rollouts(writer * 1_000_000 + rows, 64))
        time.sleep(max(0.0, start - time.time()))
        return [timed(lambda table=table: store.append("rollouts", table))[1] for table in tables]


def writers(folder: Path, count: int, rows: int) -> None:
    """Several processes at once."""
    open_store(folder).close()
    start = time.time() + 5 + count
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        found = pool.starmap(write_as, [(str(folder), writer, rows, start) for writer in range(count)])
    seconds = time.time() - start
    wall = np.concatenate([np.array(times) for times in found])
    p50, p99 = np.percentile(wall, [50, 99])
    each = " ".join(f"{sum(times):.0f}" for times in found)
    print(
        f"{count} writers, commits of 64 rows: {count * rows / seconds:,.0f} rows/s, "
        f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {wall.max():.1f} ms; milliseconds each writer took: {each}"
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--writers", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if options.writers:
            writers(root / "several", options.writers, options.rows)
            return
        print("| work | CPU ms | p50 ms | p99 ms | max ms | rows/s |\n|---|---|---|---|---|---|")
        for durability in ("power", "process"):
            times, _ = appends(root / f"small-{durability}", options.rows, 64, durability)
            show(f"64-row commits, {durability}", times, 64)
        pace = disk_pace(root, options.rows * 13_800)
        times, size = appends(root / "bulk", options.rows, 2048, "power")
        show("2,048-row commits, power", times, 2048)
        for stored in (10_000, 1_000_000):
            show(
                f"10,000 late scores on {stored:,} stored",
                scores(root / f"scores-{stored}", stored, 10_000, 12),
                10_000,
            )
        print(
            f"\n{size:,} bytes a row; sequential write with one fdatasync "
            f"{pace / 1e6:,.0f} MB/s = {pace / size:,.0f} rows/s"
        )


if __name__ == "__main__":
    main()
