"""What a query reads, and that it does not matter for the answer how it was read."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inspect_sample import ROWS, TOKEN_STATS_ROWS, at, message, rollout, sample_tables, score

from buffer_engine.errors import DamagedRowsWarning
from buffer_engine.inspect import Inspection, connect, connect_store, named_queries, views
from buffer_engine.inspect.loading import PIECE_ROWS
from buffer_engine.inspect.relations import PAYLOAD, RELATIONS, narrow_columns, read_by
from buffer_engine.inspect.source import Payload, TablesSource
from buffer_engine.schema import TABLES
from buffer_engine.store.opening import open_store

QUESTIONS = [
    *(f"FROM {name}" for name in views()),
    *(f"FROM raw.{name}" for name in RELATIONS),
    *(query.sql for query in named_queries().values()),
    "SELECT count(*) FROM rollouts WHERE logprobs IS NULL",
    "SELECT count(logprobs), count(sampling) FROM raw.rollouts",
    "SELECT count(*) FROM rollouts WHERE messages IS NOT NULL AND token_ids IS NOT NULL",
    "SELECT experience_id FROM experiences WHERE prompt = '2+2='",
    "SELECT experience_id FROM experiences ORDER BY len(response) DESC, 1 LIMIT 2",
    "SELECT EXISTS (FROM rollouts WHERE len(token_ids) > 5)",
    "SELECT max(len(messages)) FROM tasks",
    "SELECT * EXCLUDE (messages) FROM tasks",
    "SELECT task_id FROM tasks WHERE info_json LIKE '%gold%'",
    "SELECT task_id, (SELECT count(*) FROM transcripts t WHERE t.experience_id = e.experience_id) FROM rollouts AS e",
    "SELECT COLUMNS('.*_ids') FROM rollouts",
    "SUMMARIZE rollouts",
    "PIVOT rollouts ON stop_reason USING count(logprobs)",
]


class Watched(TablesSource):
    """Tables that note what is asked of them."""

    def __init__(self, tables: Mapping[str, pa.Table]) -> None:
        super().__init__(tables)
        self.asked: list[str] = []

    def rows(self, table: str, *, after: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        self.asked.append(table)
        return super().rows(table, after=after, columns=columns)

    def payload(self, table: str) -> Payload:
        self.asked.append(f"payload of {table}")
        return super().payload(table)


def answer(inspection: Inspection, sql: str) -> list[Any]:
    rows = [repr(row) for row in inspection.query(sql).to_pylist(maps_as_pydicts="strict")]
    return rows if "ORDER BY" in sql else sorted(rows)


@pytest.mark.parametrize("sql", QUESTIONS)
def test_a_query_answers_the_same_without_payload_as_with_all_of_it(sql: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = sample_tables(token_stats=TOKEN_STATS_ROWS)
    with connect(tables) as inspection:
        chosen = answer(inspection, sql)
    # By the module's name: the package's attribute `connect` is the function.
    monkeypatch.setattr(sys.modules[Inspection.__module__], "reads_payload", lambda *_: True)
    with connect(tables) as inspection:
        assert answer(inspection, sql) == chosen


@pytest.mark.parametrize(
    ("sql", "payload"),
    [
        ("SELECT task_id, avg(reward) FROM experiences GROUP BY 1", set()),
        ("SELECT model_version, count(*), avg(token_count), max(total_tokens) FROM experiences GROUP BY 1", set()),
        ("SELECT stop_reason, avg(prompt_length) FROM rollouts GROUP BY ALL", set()),
        ("FROM groups", set()),
        ("FROM conservation", set()),
        ("SELECT step, count(*) FROM token_stats GROUP BY 1", set()),
        ("SELECT prompt FROM experiences", {"rollouts"}),
        ("SELECT task_info_json FROM experiences", {"tasks"}),
        ("SELECT count(*) FROM rollouts WHERE logprobs IS NULL", {"rollouts"}),
        ("FROM tokens", {"rollouts", "token_stats"}),
    ],
)
def test_payload_is_read_only_where_the_plan_needs_it(sql: str, payload: set[str]) -> None:
    source = Watched(sample_tables(token_stats=TOKEN_STATS_ROWS))
    with Inspection({"": source}) as inspection:
        source.asked.clear()
        assert inspection.query(sql).num_rows
        taken = {name for name in PAYLOAD if f"payload of {name}" in source.asked}
    assert payload <= taken
    assert bool(payload) == bool(taken)


def test_only_the_tables_that_a_query_names_are_taken_over() -> None:
    source = Watched(sample_tables())
    with Inspection({"": source}) as inspection:
        inspection.query("FROM metrics")
        assert source.asked == ["metrics"]
        inspection.query("SELECT value FROM \"metrics\" WHERE name <> 'scores'")
        assert source.asked == ["metrics", "scores"]


def test_a_name_that_is_put_together_while_the_query_runs_is_found(sample: Inspection) -> None:
    assert sample.rows("SELECT count(*) AS n FROM query_table('sco' || 'res')") == [{"n": len(ROWS["scores"])}]
    assert read_by("FROM query_table('x')") >= set(RELATIONS)


def test_every_view_names_what_it_reads() -> None:
    assert read_by("FROM runs") >= {"rollouts", "rollout_state", "models", "batches", "metrics", "batch_state"}
    assert read_by("FROM GROUPS") >= {"experiences", "rewards", "scores", "decisions", "rollout_state"}
    assert read_by("SELECT 1") == frozenset()


def test_narrow_columns_hold_nothing_that_grows_with_a_row() -> None:
    for name, schema in RELATIONS.items():
        assert not any(pa.types.is_nested(schema.field(column).type) for column in narrow_columns(name))
    assert set(PAYLOAD) == {"tasks", "rollouts", "token_stats"}


def rollouts(first: int, count: int) -> pa.Table:
    made = [
        {
            **rollout("a0", f"g{number}", "t1", 0, "x" * (number % 3), [(9, -0.5)] * (number % 4)),
            "experience_id": f"n{number}",
        }
        for number in range(first, first + count)
    ]
    return pa.Table.from_pylist(made, schema=TABLES["rollouts"].schema)


def scores(first: int, count: int) -> pa.Table:
    made = [
        {**score("a0", "answer", float(number % 2)), "experience_id": f"n{number}"}
        for number in range(first, first + count)
    ]
    return pa.Table.from_pylist(made, schema=TABLES["scores"].schema)


LOOKS = [
    "SELECT experience_id, reward, status, token_count, total_tokens, sequence FROM experiences",
    "SELECT experience_id, name, row_order FROM raw.scores",
    "SELECT experience_id, response FROM experiences",
    "FROM groups",
]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), looks=st.lists(st.booleans(), min_size=6, max_size=6))
def test_a_refreshed_connection_answers_as_a_new_one(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], looks: list[bool]
) -> None:
    folder = tmp_path_factory.mktemp("live") / "s"
    with open_store(folder, durability="process") as store:
        store.append("tasks", pa.Table.from_pylist(ROWS["tasks"], schema=TABLES["tasks"].schema))
        with connect_store(store) as old:
            first = 0
            for size, look in zip(sizes, looks, strict=False):
                store.append("rollouts", rollouts(first, size))
                store.append("scores", scores(first, size))
                first += size
                old.refresh()
                if look:
                    answer(old, LOOKS[first % len(LOOKS)])
            with connect_store(store) as new:
                for sql in LOOKS:
                    assert answer(old, sql) == answer(new, sql)


def test_more_rows_than_one_piece_keep_their_order_and_counts() -> None:
    count = PIECE_ROWS + 10
    ids = pa.array([f"n{number}" for number in range(count)])
    one = scores(0, 1)
    many = one.take(pa.array([0] * count)).set_column(0, one.schema.field(0), ids)
    with connect({"scores": many}) as inspection:
        [found] = inspection.rows(
            "SELECT count(*) AS n, count(DISTINCT row_order) AS places, min(row_order) AS first, "
            "max(row_order) AS last "
            "FROM raw.scores"
        )
    assert found == {"n": count, "places": count, "first": 0, "last": count - 1}


def test_erased_rows_are_read_anew_and_do_not_stay_in_what_was_read() -> None:
    class Erasing(Watched):
        kept = True

        def refresh(self) -> bool:
            return self.kept

    source = Erasing(sample_tables())
    with Inspection({"": source}) as inspection:
        assert inspection.rows("SELECT response FROM experiences WHERE experience_id = 'c1'") == [{"response": "six"}]
        blank = [
            {**row, "messages": [message("user", "")]} if row["experience_id"] == "c1" else row
            for row in ROWS["rollouts"]
        ]
        source._tables = sample_tables(rollouts=blank)
        source.kept = False
        inspection.refresh()
        assert inspection.rows("SELECT response FROM experiences WHERE experience_id = 'c1'") == [{"response": ""}]


def test_an_erasure_in_a_store_makes_what_was_read_void(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", durability="process") as store:
        store.append("tasks", pa.Table.from_pylist(ROWS["tasks"], schema=TABLES["tasks"].schema))
        store.append("rollouts", rollouts(0, 3))
        with connect_store(store) as inspection:
            source = inspection._loaded[""].source
            assert source.refresh()
            erasure = {
                "experience_id": "n0",
                "run_id": "r1",
                "rule": "all",
                "reason": "asked",
                "author": "ann",
                "tokens": 3,
                "erased_at": at(9),
            }
            store.append("erasures", pa.Table.from_pylist([erasure], schema=TABLES["erasures"].schema))
            assert not source.refresh()
            assert source.refresh()


def test_a_damaged_frame_is_told_and_all_other_rows_are_shown(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    with open_store(folder, durability="process") as store:
        store.append("tasks", pa.Table.from_pylist(ROWS["tasks"], schema=TABLES["tasks"].schema))
        store.append("rollouts", rollouts(0, 3))
        store.append("scores", scores(0, 2))
        store.append("scores", scores(2, 1))
    [file] = (folder / "segments" / "scores").iterdir()
    data = bytearray(file.read_bytes())
    place = data.rindex(b"n2")
    data[place] ^= 1
    file.write_bytes(data)
    with connect_store(folder) as inspection:
        with pytest.warns(DamagedRowsWarning, match="the bytes have changed"):
            assert inspection.rows("SELECT experience_id FROM scores ORDER BY 1") == [
                {"experience_id": "n0"}, {"experience_id": "n1"},
            ]  # fmt: skip
        assert inspection.rows("SELECT count(*) AS n FROM rollouts") == [{"n": 3}]
