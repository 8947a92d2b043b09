"""Stores whose older rows lie in Parquet files: the same answers, read by DuckDB itself, and by anybody else."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from inspect_sample import ROWS, message, rollout, score

from buffer_engine.inspect import QueryError, connect_store
from buffer_engine.inspect.source import StoreSource
from buffer_engine.schema import TABLES
from buffer_engine.store.erase import EraseRule
from buffer_engine.store.layout import SEARCH_INDEX
from buffer_engine.store.local import LocalStore
from buffer_engine.store.opening import open_store

QUESTIONS = [
    "FROM rollouts",
    "FROM experiences",
    "FROM transcripts",
    "FROM tokens",
    "FROM groups",
    "FROM scores",
    "SELECT task_id, messages FROM tasks",
    "SELECT experience_id, snippet FROM search('six OR 2')",
    "SELECT response, token_ids FROM experiences JOIN rollouts USING (experience_id) WHERE experience_id = 'c1'",
    "SELECT count(*) FROM rollouts WHERE logprobs IS NULL",
]


def table(name: str, rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=TABLES[name].schema)


def fill(store: LocalStore) -> None:
    for name in ("tasks", "rollouts", "scores", "decisions", "operator_runs", "models", "metrics", "events"):
        for row in ROWS[name]:
            store.append(name, table(name, [row]))


def later(number: int) -> dict[str, Any]:
    row = rollout("a0", f"late{number}", "t1", 1, f"late {number}", [(10, -0.5)])
    return {**row, "experience_id": f"late{number}-0"}


def answers(folder: Path, until: int | None = None) -> dict[str, list[str]]:
    with connect_store(folder, until=until) as inspection:
        return {sql: sorted(repr(row) for row in inspection.query(sql).to_pylist()) for sql in QUESTIONS}


def test_compaction_changes_no_answer_now_or_as_of_then(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    with open_store(folder, durability="process") as store:
        fill(store)
        version = store.version()
        before = answers(folder)
        assert len(before["FROM experiences"]) == 8
        assert store.compact(everything=True).rows > 0
        assert StoreSource(store).payload("rollouts").files != ()
        assert answers(folder) == before
        store.append("rollouts", table("rollouts", [later(1)]))
        assert len(answers(folder)["FROM experiences"]) == 9
    assert answers(folder, until=version) == before


def test_a_connection_follows_rows_into_files_and_new_ones_beside_them(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    question = "SELECT response FROM experiences WHERE response LIKE 'late%' OR response = 'six' ORDER BY 1"
    with open_store(folder, durability="process") as store, connect_store(folder) as inspection:
        fill(store)
        for number in range(3):
            store.append("rollouts", table("rollouts", [later(number)]))
            inspection.refresh()
            said = [row["response"] for row in inspection.rows(question)]
            assert said == [*(f"late {one}" for one in range(number + 1)), "six"]
            store.compact(everything=True, grace_seconds=0.0)
            # The same version, whose files may have been merged and removed since.
            assert [row["response"] for row in inspection.rows(question)] == said
        inspection.refresh()
        plan = inspection.rows(f"EXPLAIN {question}")[0]["explain_value"]
        assert "Parquet" in plan.replace("_", " ").title()


def test_files_of_the_store_are_the_only_ones_in_reach(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a\n1\n")
    with open_store(tmp_path / "s", durability="process") as store:
        fill(store)
    with connect_store(tmp_path / "s") as inspection:
        with pytest.raises(QueryError, match="a query sees the store's views only"):
            inspection.query(f"FROM '{tmp_path / 'other.csv'}'")
        with pytest.raises(QueryError):
            inspection.query(f"FROM '{tmp_path / 's' / 'segments' / '..' / '..' / 'other.csv'}'")


def test_erased_words_are_found_no_more_and_leave_the_index(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    secret = {**later(1), "messages": [message("assistant", "secretword")]}
    with open_store(folder, durability="process") as store, connect_store(folder) as inspection:
        fill(store)
        store.append("rollouts", table("rollouts", [secret]))
        inspection.refresh()
        assert inspection.search("secretword").num_rows == 1
        store.erase(EraseRule(experience_ids=("late1-0",)), reason="asked", author="ann", force=True)
        assert not (folder / SEARCH_INDEX).exists()
        inspection.refresh()
        assert inspection.search("secretword").num_rows == 0
        assert inspection.rows("SELECT response FROM experiences WHERE experience_id = 'late1-0'") == [{"response": ""}]


def test_duckdb_and_polars_alone_read_the_parquet_files_that_the_catalog_names(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    with open_store(folder, durability="process") as store:
        fill(store)
        store.append("scores", table("scores", [score("a1", "answer", 1.0, version=2)]))
        store.compact(everything=True)
    # As docs/sql.md shows it.
    catalog = sqlite3.connect(f"file:{folder}/catalog.sqlite?mode=ro", uri=True)
    names = catalog.execute(
        "SELECT DISTINCT name FROM segments JOIN frames USING (segment_id) WHERE format = 'parquet' AND frames.tbl = ?",
        ("scores",),
    )
    files = [f"{folder}/segments/{name}" for (name,) in names]
    by_duckdb = duckdb.sql(f"SELECT name, count(*), sum(value) FROM read_parquet({files}) GROUP BY 1").fetchall()
    by_polars = pl.scan_parquet(files).group_by("name").agg(pl.len(), pl.col("value").sum()).collect().rows()
    # answer: eight first scores, one of them null and six of them 1, and a1's second one, which is 1 too.
    assert {name: (count, value) for name, count, value in by_duckdb}["answer"] == (9, 7.0)
    assert sorted(by_duckdb) == sorted(by_polars)
