"""What an operation costs as a store grows: narrow rows, one size after the other, the same operations at each.

A peer fills until its budget is used; a size that it does not reach is measured where it stands, and says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.store import shared
from benchmarks.store.data import rollout_rows, score_rows
from benchmarks.store.data_files import BATCH, SMALL
from benchmarks.store.measures import allocated
from benchmarks.store.peers import PeerKind, Unsupported
from benchmarks.store.process import Process

BLOCK = 8192
TOKENS = 16
SCORES = 1000
APPENDS, BATCHES, TURNS = 30, 60, 5
BATCH_BUDGET = 10.0
PEER_BUDGET = 60.0
OUR_BUDGET = 3600.0


@dataclass(slots=True)
class Growth:
    """One peer at one size.

    Attributes:
        cut: how much was asked when it did not get there; empty otherwise.
    """

    kind: PeerKind
    rows: int
    cut: str = ""
    values: dict[str, float | str] = field(default_factory=dict[str, "float | str"])


def sizes_to(largest: str) -> tuple[int, ...]:
    """Sizes up to `10k`, `100k`, `1m` or `10m`; none for `none`.

    Raises:
        ValueError: another word.
    """
    steps = {"none": 0, "10k": 1, "100k": 2, "1m": 3, "10m": 4}
    if largest not in steps:
        raise ValueError(f"{largest!r} is no size")
    return (10_000, 100_000, 1_000_000, 10_000_000)[: steps[largest]]


def grow(kinds: Sequence[PeerKind], sizes: Sequence[int], folder: Path, say: Callable[[str], None]) -> list[Growth]:
    """Every peer at every size it reaches within its budget; ours reaches all of them."""
    block = shared.write(folder / "block.arrow", rollout_rows(BLOCK, tokens=TOKENS))
    found: list[Growth] = []
    for kind in kinds:
        if kind.name == "ours-process":
            continue  # it differs by its syncs, which do not grow
        found += _grow_one(kind, sizes, folder, block, say)
    return found


def _grow_one(
    kind: PeerKind, sizes: Sequence[int], folder: Path, block: Path, say: Callable[[str], None]
) -> list[Growth]:
    found: list[Growth] = []
    place = folder / kind.name / "main"
    ours = kind.name.startswith("ours")
    budget = OUR_BUDGET if ours else PEER_BUDGET
    rows = version = 0
    process = Process(kind, place, patience=OUR_BUDGET)
    try:
        for size in sizes:
            say(f"growth to {size:,}: {kind.title}")
            one = Growth(kind, rows)
            found.append(one)
            try:
                said = process.ask("fill", block=str(block), first=rows, until=size, budget=budget)
                one.values["fill rows/s"] = (said["rows"] - rows) / max(said["seconds"], 1e-9)
                rows = one.rows = said["rows"]
                budget -= said["seconds"]
                if not kind.alone:  # what lives in memory is gone when it is closed
                    process.close()
                    process = Process(kind, place, patience=OUR_BUDGET)
                    first = process.ask("batch", batches=[shared.narrow_ids(np.arange(0, rows, rows // BATCH)[:BATCH])])
                    one.values["open + first batch ms"] = (process.open_seconds + first["walls"][0]) * 1e3
                rows, version = _measure(process, one, rows, version, folder, block)
            except (RuntimeError, BrokenPipeError) as error:
                one.cut = f"failed: {error}"
                break
            if rows < size:
                one.cut = f"{PEER_BUDGET:.0f} s for {size:,}"
                break
    finally:
        process.close()
    return found


def _measure(process: Process, one: Growth, rows: int, version: int, folder: Path, block: Path) -> tuple[int, int]:
    values = one.values
    parts = shared.read(block)
    files = [
        str(shared.write(folder / "small" / f"{at}.arrow", shared.renamed(parts.slice(0, SMALL), rows + SMALL * at)))
        for at in range(APPENDS)
    ]
    said = process.ask("append", files=files, budget=PEER_BUDGET)
    rows += said["rows"]
    values["64-row append p50 ms"] = _middle(said["walls"])
    values["64-row append CPU ms"] = _middle(said["cpus"])
    random = np.random.default_rng([7, rows])
    batches = [shared.narrow_ids(random.choice(one.rows, BATCH, replace=False)) for _ in range(BATCHES)]
    said = process.ask("batch", batches=batches, budget=BATCH_BUDGET)
    # Whatever a peer checks or caches when it first meets a part of the store is over by the last third.
    settled = len(said["walls"]) * 2 // 3
    values["batch of 256 p50 ms"] = _middle(said["walls"][settled:])
    values["batch CPU ms"] = _middle(said["cpus"][settled:])
    values["batch of 256, first ms"] = said["walls"][0] * 1e3
    scored = shared.narrow_ids(random.choice(one.rows, SCORES, replace=False))
    files = [
        str(shared.write(folder / "scores" / f"{at}.arrow", score_rows(scored, version=version + at + 1)))
        for at in range(TURNS)
    ]
    try:
        said = process.ask("score", files=files)
        values["late scores, 1,000 keys ms"], values["late scores CPU ms"] = (
            _middle(said["walls"]),
            _middle(said["cpus"]),
        )
    except Unsupported as error:
        values["late scores, 1,000 keys ms"] = str(error)
    try:
        said = process.ask("group_by", repeats=TURNS)
        values["group-by ms"] = _middle(said["walls"])
        values["group-by / DuckDB on Parquet"] = _middle(said["walls"]) / _duckdb_on_parquet(folder, parts, rows)
    except Unsupported as error:
        values["group-by ms"] = str(error)
    if not one.kind.alone:
        values["bytes/row"] = allocated(process.folder) / rows
    return rows, version + TURNS


def _duckdb_on_parquet(folder: Path, block: pa.Table, rows: int) -> float:
    """Milliseconds of the same aggregation over one Parquet file that holds only the columns it needs."""
    path = folder / f"narrow-{rows}.parquet"
    if not path.exists():
        columns = ["experience_id", "model_version", "stop_reason", "prompt_length"]
        with pq.ParquetWriter(path, block.select(columns).schema, compression="zstd") as writer:
            for first in range(0, rows, block.num_rows * 16):
                parts = [
                    shared.renamed(block.slice(0, rows - at), at).select(columns)
                    for at in range(first, min(first + block.num_rows * 16, rows), block.num_rows)
                ]
                writer.write_table(pa.concat_tables(parts))
    walls: list[float] = []
    with duckdb.connect() as connection:
        for _ in range(TURNS + 1):
            begin = time.perf_counter()
            connection.execute(
                "SELECT model_version, stop_reason, count(*), avg(prompt_length) FROM read_parquet(?) GROUP BY ALL",
                [str(path)],
            ).fetchall()
            walls.append(time.perf_counter() - begin)
    return _middle(walls[1:])


def _middle(seconds: Sequence[float]) -> float:
    return float(np.median(seconds)) * 1e3
