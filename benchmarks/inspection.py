"""What SQL over a store costs: processor time of questions, beside DuckDB on one Parquet file of the same columns.

    python -m benchmarks.inspection --rows 1000000 --frame 64

One store of small rollouts, written in record batches of `--frame` rows, each rollout with two scores and a verdict. A
question is asked cold (a new connection, which takes its tables over), then warm after a refresh; warm is the median of
nine. `--search` adds a full-text index over replies of 120 words.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from buffer_engine.inspect import Inspection, connect_store
from buffer_engine.inspect.relations import narrow_columns
from buffer_engine.schema import TABLES
from buffer_engine.store import open_store
from buffer_engine.store.local import LocalStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from store_rows import decision, rollout, score, table, task

GROUP, TASKS, TOKENS, PROMPT = 8, 1000, 16, 8
METADATA = "SELECT model_version, stop_reason, count(*), avg(prompt_length) FROM {} GROUP BY ALL"
QUESTIONS = {
    "group-by on metadata of rollouts": METADATA.format("raw.rollouts"),
    "experiences: mean reward by task": "SELECT task_id, avg(reward) FROM experiences GROUP BY 1",
    "experiences: rows by fate": "SELECT fate, count(*), avg(token_count) FROM experiences GROUP BY 1",
    "groups by status": "SELECT status, count(*), avg(reward_std) FROM groups GROUP BY 1",
    "scores by name": "SELECT name, count(*), avg(value) FROM scores WHERE is_current GROUP BY 1",
}


def repeated(of: str, row: dict[str, object], count: int, **changed: pa.Array) -> pa.Table:
    """`count` times the row, with other values in the columns of `changed`."""
    schema = TABLES[of].schema
    columns = [changed.get(field.name, pa.repeat(pa.scalar(row[field.name], field.type), count)) for field in schema]
    return pa.table(columns, schema=schema)


def fill(store: LocalStore, rows: int, frame: int, *, words: int) -> None:
    """Append tasks, then rollouts, scores and verdicts in batches of `frame` rollouts."""
    rng = np.random.default_rng(0)
    store.append("tasks", table("tasks", [task(f"t{number}") for number in range(TASKS)]))
    vocabulary = np.array([f"word{number}" for number in range(20_000)])
    like = rollout(0)
    when = datetime(2026, 1, 1, tzinfo=UTC)
    for first in range(0, rows, frame):
        numbers = np.arange(first, min(first + frame, rows))
        count = len(numbers)
        ids = pa.array([f"{number * 2654435761 % 2**48:012x}{number:08x}" for number in numbers])
        offsets = pa.array(np.arange(0, (count + 1) * TOKENS, TOKENS, dtype=np.int32))
        mask = np.tile(np.arange(TOKENS) >= PROMPT, count)
        changed: dict[str, pa.Array] = {
            "experience_id": ids,
            "group_id": pa.array([f"g{number // GROUP:010x}" for number in numbers]),
            "task_id": pa.array([f"t{number // GROUP % TASKS}" for number in numbers]),
            "group_size": pa.repeat(pa.scalar(GROUP, pa.int32()), count),
            "sample_index": pa.array((numbers % GROUP).astype(np.int32)),
            "model_version": pa.array(numbers // 10_000),
            "stop_reason": pa.array(np.where(numbers % 7 == 0, "length", "eos")),
            "prompt_length": pa.repeat(pa.scalar(PROMPT, pa.int32()), count),
            "token_ids": pa.ListArray.from_arrays(offsets, pa.array(rng.integers(0, 30_000, count * TOKENS, np.int32))),
            "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(mask)),
            "logprobs": pa.ListArray.from_arrays(
                offsets, pa.array(-rng.random(count * TOKENS, dtype=np.float32), mask=~mask)
            ),
        }
        if words:
            # Zipf's law, roughly: few words often, most words seldom.
            picked = vocabulary[np.minimum(rng.zipf(1.3, (count, words)), len(vocabulary)) - 1]
            replies = [" ".join(line) for line in picked]
            changed["messages"] = pa.array(
                [[like["messages"][0], {**like["messages"][1], "content": reply}] for reply in replies],
                TABLES["rollouts"].schema.field("messages").type,
            )
        store.append("rollouts", repeated("rollouts", like, count, **changed))
        given = {
            "answer": pa.array((numbers % 3 == 0).astype(np.float64)),
            "style": pa.array(rng.random(count)),
        }
        scores = [
            repeated("scores", {**score("x"), "scored_at": when}, count, experience_id=ids, value=values,
                     name=pa.repeat(name, count))
            for name, values in given.items()
        ]  # fmt: skip
        verdicts = pa.array(np.where(numbers % 5 == 0, "reject", "keep"))
        decided = repeated(
            "decisions", {**decision("x"), "decided_at": when}, count, experience_id=ids, verdict=verdicts
        )
        store.append_all({"scores": pa.concat_tables(scores), "decisions": decided})


def cost(ask: Callable[[], object], *, times: int = 1) -> float:
    """Median processor milliseconds of `ask`."""
    taken: list[float] = []
    for _ in range(times):
        before = time.process_time()
        ask()
        taken.append((time.process_time() - before) * 1e3)
    return statistics.median(taken)


def alone(folder: Path, store: LocalStore) -> float:
    """The same question to DuckDB on one Parquet file of the same narrow columns."""
    file = folder / "rollouts.parquet"
    pq.write_table(store.table("rollouts", columns=narrow_columns("rollouts")), file, compression="zstd")
    with duckdb.connect() as connection:
        return cost(lambda: connection.sql(METADATA.format(f"'{file}'")).to_arrow_table(), times=9)


def measure(store: LocalStore, inspection: Inspection) -> None:
    """Print a line per question."""
    print(f"{'question':<36} {'cold ms':>9} {'warm ms':>9}")
    cold: dict[str, float] = {}
    for name, sql in QUESTIONS.items():
        with connect_store(store) as fresh:
            cold[name] = cost(lambda sql=sql, fresh=fresh: fresh.query(sql))
        inspection.query(sql)
    print(
        f"{'(refresh, nothing new, packs once)':<36} {cost(inspection.refresh):>9.1f} {cost(inspection.refresh):>9.1f}"
    )
    for name, sql in QUESTIONS.items():
        warm = cost(lambda sql=sql: inspection.query(sql), times=9)
        print(f"{name:<36} {cold[name]:>9.1f} {warm:>9.1f}")


def main() -> None:
    """Make the store, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--frame", type=int, default=64)
    parser.add_argument("--search", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with open_store(folder / "store", durability="process") as store:
            fill(store, chosen.rows, chosen.frame, words=120 if chosen.search else 0)
            print(f"{chosen.rows:,} rollouts in record batches of {chosen.frame}; connecting: ", end="")
            print(f"{cost(lambda: connect_store(store).close()):.0f} ms")
            with connect_store(store) as inspection:
                measure(store, inspection)
            print(f"{'the first, DuckDB on one Parquet file':<36} {'':>9} {alone(folder, store):>9.1f}")
            if chosen.search:
                with connect_store(store) as inspection:
                    built = cost(lambda: inspection.search("word7 word23"))
                with connect_store(store) as inspection:
                    inspection.query("FROM experiences LIMIT 1")
                    again = cost(lambda: inspection.search("word900 word901"))
                    hits = inspection.search("word900 word901").num_rows
                size = (folder / "store" / "search.sqlite").stat().st_size
                text = store.table("rollouts", columns=["messages"]).nbytes
                each = built / chosen.rows * 1e3
                print(f"making the search index: {each:.0f} µs a rollout, {size / text:.2f} bytes a byte of messages")
                print(f"searching two seldom words: {again:.1f} ms, {hits} hits")


if __name__ == "__main__":
    main()
