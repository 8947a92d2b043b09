"""Bad rows refused one by one: each named with its key and reason, the good ones stored, all of it counted."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from backends import examples, open_store
from hypothesis import given, settings
from hypothesis import strategies as st
from store_rows import decision, rollout, rollouts, score, table, task

from buffer_engine.errors import KeyConflictError, PartitionError, SchemaError
from buffer_engine.store import LocalStore

pytestmark = pytest.mark.usefixtures("backend")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    with open_store(tmp_path / "store", durability="process") as opened:
        yield opened


def refused(store: LocalStore) -> list[tuple[str | None, str]]:
    events = store.table("events").to_pylist()
    assert all(event["kind"] == "refused_row" and event["count"] == 1 for event in events)
    return [(event["experience_id"], event["detail"]) for event in events]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"loss_mask": [True]}, "loss_mask", "has length 1 and token_ids has length 4; both describe the same tokens"),
    ({"logprobs": [None, None, float("nan"), -1.0]}, "logprobs", "a number must be finite"),
    ({"partition": "test"}, "partition", "is 'test'; known: train, eval"),
    ({"stop_reason": None}, "stop_reason", "is null; it needs a value"),
]


@pytest.mark.parametrize(("changes", "field", "reason"), BAD)
def test_a_bad_row_is_named_and_its_neighbours_are_stored(
    store: LocalStore, changes: dict[str, Any], field: str, reason: str
) -> None:
    made = [rollout(n, **(changes if n == 2 else {})) for n in range(5)]
    rows = pa.Table.from_pylist(made, schema=pa.schema([f.with_nullable(True) for f in table("rollouts", []).schema]))
    receipt = store.append_all({"rollouts": rows}, on_invalid="refuse_rows")
    assert (receipt.appended, receipt.unchanged) == ({"rollouts": 4}, {"rollouts": 0})
    (one,) = receipt.refused
    assert (one.table, one.key, one.field) == ("rollouts", "experience_id='x2'", field)
    assert one.reason.startswith(reason)
    assert store.table("rollouts").column("experience_id").to_pylist() == ["x0", "x1", "x3", "x4"]
    ((about, detail),) = refused(store)
    assert about == "x2"
    assert detail.startswith(f"rollouts: experience_id='x2': {field}: {reason}")
    assert store.table("events").column("run_id").to_pylist() == ["run"]
    assert store.verify() == []


@pytest.mark.parametrize(("changes", "field", "reason"), BAD)
def test_by_default_one_bad_row_refuses_all(
    store: LocalStore, changes: dict[str, Any], field: str, reason: str
) -> None:
    made = [rollout(n, **(changes if n == 2 else {})) for n in range(5)]
    rows = pa.Table.from_pylist(made, schema=pa.schema([f.with_nullable(True) for f in table("rollouts", []).schema]))
    with pytest.raises(SchemaError, match=f"'x2': {field}:? {reason[:12]}"):
        store.append("rollouts", rows)
    assert store.version() == 0


def test_a_conflict_is_refused_and_an_equal_repeat_is_not(store: LocalStore) -> None:
    store.append("rollouts", rollouts([0, 1]))
    mixed = table("rollouts", [rollout(0), rollout(1, stop_reason="length"), rollout(2)])
    receipt = store.append_all({"rollouts": mixed}, on_invalid="refuse_rows")
    assert (receipt.appended, receipt.unchanged) == ({"rollouts": 1}, {"rollouts": 1})
    (one,) = receipt.refused
    assert (one.key, one.field) == ("experience_id='x1'", "stop_reason")
    assert one.reason == "stop_reason is 'eos' there and 'length' here"
    with pytest.raises(KeyConflictError):
        store.append("rollouts", mixed)


def test_of_one_key_twice_in_an_append_the_first_row_is_stored(store: LocalStore) -> None:
    twice = table("rollouts", [rollout(0), rollout(0, stop_reason="length"), rollout(0)])
    receipt = store.append_all({"rollouts": twice}, on_invalid="refuse_rows")
    assert (receipt.appended, receipt.unchanged, len(receipt.refused)) == ({"rollouts": 1}, {"rollouts": 1}, 1)
    assert store.table("rollouts").column("stop_reason").to_pylist() == ["eos"]


def test_what_is_about_a_refused_rollout_is_refused_with_it(store: LocalStore) -> None:
    receipt = store.append_all(
        {
            "scores": table("scores", [score("x0"), score("x1")]),
            "decisions": table("decisions", [decision("x1"), decision("x0")]),
            "rollouts": table("rollouts", [rollout(0), rollout(1, loss_mask=[True])]),
        },
        cursors={"chunk": 1},
        on_invalid="refuse_rows",
    )
    assert receipt.appended == {"scores": 1, "decisions": 1, "rollouts": 1}
    assert [(one.table, one.field) for one in receipt.refused] == [
        ("rollouts", "loss_mask"), ("scores", "experience_id"), ("decisions", "experience_id"),
    ]  # fmt: skip
    assert store.cursor("chunk") == 1
    assert len(refused(store)) == 3
    assert store.verify() == []


def test_a_conflicting_score_is_refused_by_its_whole_key(store: LocalStore) -> None:
    store.append_all({"rollouts": rollouts([0, 1]), "scores": table("scores", [score("x0", 1.0)])})
    rows = table("scores", [score("x0", 0.5), score("x1", 1.0), score("x9", 1.0)])
    receipt = store.append_all({"scores": rows}, on_invalid="refuse_rows")
    assert receipt.appended == {"scores": 1}
    assert [(one.key, one.field) for one in receipt.refused] == [
        ("experience_id='x0', name='answer', version=1", "value"),
        ("experience_id='x9', name='answer', version=1", "experience_id"),
    ]


def test_a_row_without_key_is_called_by_its_number(store: LocalStore) -> None:
    schema = pa.schema([field.with_nullable(True) for field in table("rollouts", []).schema])
    rows = pa.Table.from_pylist([rollout(0), rollout(1), rollout(2, experience_id=None)], schema=schema)
    (one,) = store.append_all({"rollouts": rows}, on_invalid="refuse_rows").refused
    assert (one.key, one.field) == ("row 2", "experience_id")


def test_what_is_wrong_with_the_append_refuses_all_of_it(store: LocalStore) -> None:
    rows = rollouts([0, 1])
    with pytest.raises(SchemaError, match="unknown column 'extra'"):
        store.append_all({"rollouts": rows.append_column("extra", pa.array([1, 2]))}, on_invalid="refuse_rows")
    at = rows.column_names.index("token_ids")
    with pytest.raises(SchemaError, match="token_ids: expected list"):
        store.append_all({"rollouts": rows.set_column(at, "token_ids", pa.array(["a", "b"]))}, on_invalid="refuse_rows")
    store.append("tasks", table("tasks", [task("t0")]))
    with pytest.raises(PartitionError):
        store.append_all({"rollouts": rollouts([0, 1], partition="eval")}, on_invalid="refuse_rows")
    assert store.table("rollouts").num_rows == store.table("events").num_rows == 0


def test_nothing_but_bad_rows_stores_their_events_only(store: LocalStore) -> None:
    bad = table("rollouts", [rollout(n, loss_mask=[True]) for n in range(3)])
    receipt = store.append_all({"rollouts": bad}, on_invalid="refuse_rows")
    assert (receipt.appended, receipt.unchanged, len(receipt.refused)) == ({"rollouts": 0}, {"rollouts": 0}, 3)
    assert [about for about, _ in refused(store)] == ["x0", "x1", "x2"]


def test_good_rows_and_refused_rows_are_all_the_rows() -> None:
    @settings(max_examples=examples(40), deadline=None)
    @given(st.lists(st.sampled_from(["good", "length", "nan", "value", "conflict"]), max_size=30))
    def holds(kinds: list[str]) -> None:
        changes: dict[str, dict[str, Any]] = {
            "good": {}, "length": {"logprobs": [-1.0]}, "nan": {"logprobs": [float("inf")] * 4},
            "value": {"partition": "none"}, "conflict": {"stop_reason": "length"},
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as folder, open_store(folder, durability="process") as store:
            before = [n for n, kind in enumerate(kinds) if kind == "conflict"]
            store.append("rollouts", rollouts(before))
            rows = table("rollouts", [rollout(n, **changes[kind]) for n, kind in enumerate(kinds)])
            receipt = store.append_all({"rollouts": rows}, on_invalid="refuse_rows")
            good = [f"x{n}" for n, kind in enumerate(kinds) if kind == "good"]
            bad = {f"experience_id='x{n}'" for n, kind in enumerate(kinds) if kind != "good"}
            assert receipt.appended["rollouts"] == len(good)
            assert receipt.unchanged["rollouts"] == 0
            assert {one.key for one in receipt.refused} == bad
            assert len(receipt.refused) == len(bad) == store.table("events").num_rows
            assert store.table("rollouts").column("experience_id").to_pylist() == [f"x{n}" for n in before] + good

    holds()
