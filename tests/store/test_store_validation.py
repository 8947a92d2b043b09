"""Rows that do not fit are refused by name, and rows that do fit in another type are taken unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from backends import open_store
from store_rows import rollout, rollouts, score, table, task

from buffer_engine.errors import SchemaError
from buffer_engine.store import LocalStore

pytestmark = pytest.mark.usefixtures("backend")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory):
    with open_store(tmp_path_factory.mktemp("v") / "s", durability="process") as opened:
        yield opened


@pytest.fixture
def store(tmp_path: Path):
    with open_store(tmp_path / "s", durability="process") as opened:
        yield opened


def replaced(given: pa.Table, name: str, values: list[Any], kind: pa.DataType) -> pa.Table:
    return given.set_column(given.column_names.index(name), name, pa.array(values, kind))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [-0.5]}, r"x1.*logprobs has length 1 and token_ids has length 4"),
        ({"loss_mask": [True] * 5}, r"x1.*loss_mask has length 5 and token_ids has length 4"),
        ({"token_ids": []}, r"x1.*loss_mask has length 4 and token_ids has length 0"),
        ({"logprobs": [None, None, float("nan"), -1.0]}, r"x1.*logprobs.*finite"),
        ({"logprobs": [None, None, float("-inf"), -1.0]}, r"x1.*logprobs.*finite.*-inf"),
        ({"sampling": {"temperature": float("inf")}}, r"x1.*sampling.*finite"),
        ({"token_ids": [1, None, 3, 4]}, r"x1.*token_ids.*null.*\[1, None, 3, 4\]"),
        ({"loss_mask": [True, None, True, True]}, r"x1.*loss_mask.*null"),
        ({"messages": [None]}, r"x1.*messages.*null"),
        ({"partition": "test"}, r"x1.*partition is 'test'; known: train, eval"),
        ({"experience_id": "a\0b"}, r"experience_id.*NUL"),
    ],
)  # fmt: skip
def test_a_wrong_rollout_is_refused_by_key_field_and_value(
    shared: LocalStore, changes: dict[str, Any], message: str
) -> None:
    rows = table("rollouts", [rollout(0), rollout(1, **changes)])
    with pytest.raises(SchemaError, match=message):
        shared.append("rollouts", rows)
    assert shared.version() == 0
    assert shared.table("rollouts").num_rows == 0


def test_a_null_where_none_may_be_is_named(shared: LocalStore) -> None:
    rows = replaced(rollouts([0, 1, 2]), "stop_reason", ["eos", "eos", None], pa.string())
    with pytest.raises(SchemaError, match=r"rollouts: experience_id='x2': stop_reason is null"):
        shared.append("rollouts", rows)


@pytest.mark.parametrize(
    ("name", "values", "kind", "message"),
    [
        ("model_version", ["0"], pa.string(), r"x0.*model_version.*expected int64, found string.*'0'"),
        ("prompt_length", [2.0], pa.float64(), r"prompt_length.*expected int32, found double"),
        ("truncated", [1], pa.int8(), r"truncated.*expected bool"),
        ("task_id", [b"t"], pa.binary(), r"task_id.*expected string, found binary"),
        ("prompt_length", [2**31], pa.int64(), r"prompt_length.*int32 without loss.*2147483648"),
        ("token_ids", [[1, 2, 3, -(2**31) - 1]], pa.list_(pa.int64()), r"token_ids.*int32 without loss"),
        ("logprobs", [[None, None, 0.1, 0.5]], pa.list_(pa.float64()), r"logprobs.*float without loss"),
        ("logprobs", [0.5], pa.float32(), r"logprobs.*expected list"),
        ("created_at", [0], pa.timestamp("us"), r"created_at.*timestamp\[us, tz=UTC\], found timestamp\[us\]"),
        ("created_at", [1], pa.timestamp("ns", "UTC"), r"created_at.*without loss"),
        ("sampling", [{"heat": 1.0}], pa.struct([("heat", pa.float64())]), r"sampling.*unknown field 'heat'"),
        ("messages", [[{"content": "x"}]], pa.list_(pa.struct([("content", pa.string())])), r"'role' is null"),
    ],
)  # fmt: skip
def test_a_type_that_loses_something_is_refused(
    shared: LocalStore, name: str, values: list[Any], kind: pa.DataType, message: str
) -> None:
    with pytest.raises(SchemaError, match=message):
        shared.append("rollouts", replaced(rollouts([0]), name, values, kind))
    assert shared.version() == 0


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("task_id", ["t0"], pa.large_string()),
        ("task_id", ["t0"], pa.string_view()),
        ("task_id", ["t0"], pa.dictionary(pa.int32(), pa.string())),
        ("error", [None], pa.null()),
        ("prompt_length", [2], pa.int64()),
        ("model_version", [0], pa.uint8()),
        ("token_ids", [[0, 2, 3, 4]], pa.large_list(pa.int64())),
        ("token_ids", [[0, 2, 3, 4]], pa.list_(pa.int32(), 4)),
        ("logprobs", [[None, None, -0.5, -0.25]], pa.list_(pa.float64())),
        ("sampling", [{"seed": 7, "temperature": 1, "top_p": 1.0, "max_tokens": 8}],
         pa.struct([("seed", pa.int32()), ("temperature", pa.int8()), ("top_p", pa.float32()),
                    ("max_tokens", pa.int64())])),
    ],
)  # fmt: skip
def test_a_wider_type_with_fitting_values_is_the_same_content(
    store: LocalStore, name: str, values: list[Any], kind: pa.DataType
) -> None:
    store.append("rollouts", rollouts([0]))
    assert store.append("rollouts", replaced(rollouts([0]), name, values, kind)).unchanged == {"rollouts": 1}


def test_rows_that_went_through_polars_are_the_same_content(store: LocalStore) -> None:
    given = table("rollouts", [rollout(0), rollout(1, logprobs=None, sampling=None, error="x: y"), rollout(2)])
    store.append("rollouts", given)
    frame = pl.from_arrow(given)
    assert isinstance(frame, pl.DataFrame)
    assert store.append("rollouts", frame.to_arrow()).unchanged == {"rollouts": 3}
    assert store.append("rollouts", frame.slice(1, 2).to_arrow()).unchanged == {"rollouts": 2}


def test_unknown_names_come_with_a_suggestion(shared: LocalStore) -> None:
    with pytest.raises(SchemaError, match="did you mean 'rollouts'"):
        shared.append("rolouts", rollouts([0]))
    with pytest.raises(SchemaError, match="unknown column 'stop_reasn': did you mean 'stop_reason'"):
        shared.append("rollouts", rollouts([0]).append_column("stop_reasn", pa.array(["eos"])))
    with pytest.raises(SchemaError, match=r"missing column\(s\) run_id, task_id"):
        shared.append("rollouts", rollouts([0]).drop_columns(["task_id", "run_id"]))
    with pytest.raises(SchemaError, match="2 times"):
        shared.append("rollouts", rollouts([0]).append_column("error", pa.array([None], pa.string())))


def test_scores_may_be_null_or_whole_numbers_but_never_nan(store: LocalStore) -> None:
    store.append("rollouts", rollouts([0]))
    with pytest.raises(SchemaError, match=r"experience_id='x0', name='answer', version=1: value"):
        store.append("scores", table("scores", [score("x0", float("nan"))]))
    whole = replaced(table("scores", [score("x0")]), "value", [1], pa.int64())
    store.append("scores", whole)
    store.append("scores", table("scores", [score("x0", None, version=2)]))
    assert store.table("scores", columns=["value"]).column(0).to_pylist() == [1.0, None]


def test_a_verdict_outside_the_five_is_refused(shared: LocalStore) -> None:
    from store_rows import decision

    with pytest.raises(SchemaError, match="verdict is 'drop'; known: keep, reject, hold, release, mask"):
        shared.append("decisions", table("decisions", [decision("x0", "drop")]))


def test_a_task_without_messages_field_role_is_refused(shared: LocalStore) -> None:
    with pytest.raises(SchemaError, match="missing column"):
        shared.append("tasks", table("tasks", [task("a")]).drop_columns(["messages"]))
