"""What reading a batch costs: rows by id to padded numpy arrays, beside a plain copy of as many bytes.

    python -m benchmarks.padded --rows 8192 --batch 256

Rows are those of `benchmarks.heavy_rows`, stored in commits of 64; each batch is drawn at random.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np

from benchmarks.heavy_rows import heavy_rollouts
from buffer_engine.store import LocalStore, open_store
from buffer_engine.store.padded import TOKEN_COLUMNS, PadBuffers


def cost(work: Callable[[], object]) -> float:
    """Processor milliseconds."""
    started = time.process_time()
    work()
    return (time.process_time() - started) * 1e3


def one_turn(store: LocalStore, ids: list[str], out: PadBuffers, packed: PadBuffers) -> dict[str, float]:
    """Costs of each way of reading the same rows, and the size of the padded batch."""
    batch = store.padded(ids, out=out)
    source = np.concatenate([values.reshape(-1).view(np.uint8) for values in batch.columns.values()])
    target = np.empty_like(source)
    np.copyto(target, source)
    return {
        "bytes": float(source.nbytes),
        "memcpy of the padded bytes": cost(lambda: np.copyto(target, source)),
        "padded, memory used again": cost(lambda: store.padded(ids, out=out)),
        "padded, new memory": cost(lambda: store.padded(ids)),
        "packed, memory used again": cost(lambda: store.packed(ids, out=packed)),
        "fetch of the same columns as an Arrow table": cost(lambda: store.fetch(ids, columns=TOKEN_COLUMNS)),
    }


def main() -> None:
    """Print a table; every number is the median over the batches, which all ways read in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--turns", type=int, default=40)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder, open_store(folder, durability="process") as store:
        ids: list[str] = []
        for first in range(0, options.rows, 64):
            rows = heavy_rollouts(first, 64)
            ids += rows.column("experience_id").to_pylist()
            store.append("rollouts", rows)
        names = np.array(ids)
        out, packed = PadBuffers(), PadBuffers()
        store.padded(ids, out=out)  # every frame is checked on its first use
        times: dict[str, list[float]] = {}
        for _ in range(options.turns):
            chosen: list[str] = random.choice(names, options.batch, replace=False).tolist()
            for name, milliseconds in one_turn(store, chosen, out, packed).items():
                times.setdefault(name, []).append(milliseconds)
    copy = statistics.median(times["memcpy of the padded bytes"])
    print(f"{options.batch} rows, {statistics.median(times.pop('bytes')) / 1e6:.1f} MB padded\n")
    print("| way | CPU ms | of the copy |\n|---|---|---|")
    for name, values in times.items():
        print(f"| {name} | {statistics.median(values):.2f} | {statistics.median(values) / copy:.1f} |")


if __name__ == "__main__":
    main()
