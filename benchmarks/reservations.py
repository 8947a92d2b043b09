"""What a reservation costs as a store grows: processor time per policy at two sizes, both stores read in turn.

    python -m benchmarks.reservations --small 10000 --large 300000

Each size is one store of small rows in groups of eight, scored and kept; each reservation takes 64 rows, which are
given back at once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from buffer_engine.store import open_store
from buffer_engine.store.base import ReadPolicy
from buffer_engine.store.local import LocalStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from store_rows import decisions, rollouts, score, table, task

GROUP = 8
BLOCK = 4096
POLICIES: dict[str, dict[str, Any]] = {
    "fifo, each row once": {"type": "fifo"},
    "newest, each row once": {"type": "newest"},
    "fifo, four uses": {"type": "fifo", "max_uses": 4},
    "uniform": {"type": "uniform"},
    "prioritized by reward": {"type": "prioritized", "by": "reward"},
    "prioritized by staleness": {"type": "prioritized", "by": "staleness"},
    "stratified by task": {"type": "stratified", "by": "task"},
    "mixture": {"type": "mixture", "expert_share": 0.25},
}


def fill(store: LocalStore, rows: int) -> None:
    """Append `rows` rollouts with 500 tasks, a score between 0 and 1 and a keep each."""
    store.append("tasks", table("tasks", [task(f"t{number}") for number in range(500)]))
    for first in range(0, rows, BLOCK):
        numbers = range(first, min(first + BLOCK, rows))
        made = rollouts(numbers, group_size=GROUP).to_pylist()
        for number, row in zip(numbers, made, strict=True):
            row["task_id"] = f"t{number // GROUP % 500}"
            row["made_by"] = "import" if number // GROUP % 4 == 0 else "explorer"
        store.append_all(
            {
                "rollouts": table("rollouts", made),
                "scores": table("scores", [score(f"x{number}", (number % 11) / 10) for number in numbers]),
                "decisions": decisions(numbers),
            }
        )


def cost(store: LocalStore, policy: ReadPolicy, turn: int) -> float:
    """Processor seconds of one reservation of 64 rows."""
    batch_id = f"{policy.type}/{turn}"
    started = time.process_time()
    taken = store.reserve(policy, run_id="run", batch_id=batch_id, model_version=0)
    seconds = time.process_time() - started
    if taken is None:
        raise SystemExit(f"{policy.type} found nothing to reserve")
    store.release(batch_id)
    return seconds


def main() -> None:
    """Print one line a policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=10_000)
    parser.add_argument("--large", type=int, default=300_000)
    parser.add_argument("--turns", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with (
            open_store(Path(folder) / "small", durability="process") as small,
            open_store(Path(folder) / "large", durability="process") as large,
        ):
            fill(small, options.small)
            fill(large, options.large)
            print(f"| policy | {options.small:,} rows | {options.large:,} rows | ratio |\n|---|---|---|---|")
            for name, fields in POLICIES.items():
                policy = ReadPolicy.model_validate({"rows": 64, **fields}).seeded(1)
                for store in (small, large):  # the first builds the index
                    cost(store, policy, -1)
                seconds = [(cost(small, policy, turn), cost(large, policy, turn)) for turn in range(options.turns)]
                first, second = (statistics.median(values) * 1e3 for values in zip(*seconds, strict=True))
                print(f"| {name} | {first:.2f} ms | {second:.2f} ms | {second / first:.2f} |")


if __name__ == "__main__":
    main()
