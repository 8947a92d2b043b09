"""The frame: text, counts, info columns, components and the reward."""

from __future__ import annotations

import json

import polars as pl
import pytest
from operator_rows import message, rollout, rollouts, scores, tasks

from buffer_engine.errors import SchemaError
from operators.frame import FRAME_COLUMNS, build_frame, current_reward, rollout_columns

TASKS = tasks({"t0": {"answer": "4", "n": 2, "parts": [1, "a"]}, "t1": {"answer": "9"}})
INFO = {"answer": pl.String(), "n": pl.Int64(), "parts": pl.Object()}


def test_text_turns_and_token_counts_are_read_off_the_row():
    rows = rollouts(
        rollout(
            "a",
            messages=[message("system", "s"), message("user", "u1"), message("assistant", "r1"), message("user", "u2"),
                      message("assistant", "r2")],
        ),
        rollout("b", messages=[message("user", "only")], token_ids=[], loss_mask=[], logprobs=None, prompt_length=0),
        rollout("c", messages=[message("assistant", None)], logprobs=[None, None, -1.0, None, -2.0]),
    )  # fmt: skip
    columns = ["prompt", "response", "turns", "token_count", "total_tokens", "mean_logprob"]
    found = build_frame(rows, TASKS, scores(), columns=columns, info_columns=INFO)
    assert found.columns == ["experience_id", "task_id", "group_id", *columns]
    assert found["prompt"].to_list() == ["u2", "only", ""]
    assert found["response"].to_list() == ["r2", "", ""]
    assert found["turns"].to_list() == [2, 0, 1]
    assert found["token_count"].to_list() == [3, 0, 3]
    assert found["total_tokens"].to_list() == [5, 0, 5]
    assert found["mean_logprob"].to_list() == [-2.0, None, -1.5]


def test_every_declared_column_has_its_declared_type_even_without_rows():
    for table in (rollouts(), rollouts(rollout("a"))):
        found = build_frame(table, TASKS, scores(), columns=list(FRAME_COLUMNS), info_columns={})
        assert dict(found.schema) == {name: FRAME_COLUMNS[name].dtype for name in found.columns}
        assert set(found.columns) == set(FRAME_COLUMNS)


def test_only_the_columns_asked_for_are_read_from_the_table():
    slim = rollouts(rollout("a")).select(rollout_columns(["response"]))
    assert slim.column_names == ["experience_id", "task_id", "group_id", "messages"]
    found = build_frame(slim, TASKS, scores(), columns=["response"], info_columns={})
    assert found.row(0) == ("a", "t0", "g0", "4")


def test_info_keys_become_columns_and_a_missing_key_is_null():
    rows = rollouts(rollout("a", task_id="t1"), rollout("b", task_id="t0"))
    found = build_frame(rows, TASKS, scores(), columns=["answer", "n", "parts", "task_info"], info_columns=INFO)
    assert found["experience_id"].to_list() == ["a", "b"]
    assert found["answer"].to_list() == ["9", "4"]
    assert found["n"].to_list() == [None, 2]
    assert found["parts"].to_list() == [None, '[1, "a"]']
    assert json.loads(found["task_info"][0]) == {"answer": "9"}


def test_an_info_value_of_another_type_is_refused_with_task_key_and_value():
    wrong = tasks({"t0": {"n": "two"}})
    with pytest.raises(SchemaError, match=r"task 't0': info key 'n' is 'two' \(str\).*Int64"):
        build_frame(rollouts(rollout("a")), wrong, scores(), columns=["n"], info_columns=INFO)


def test_a_rollout_without_its_task_is_refused():
    with pytest.raises(SchemaError, match="attempts task 'gone'"):
        build_frame(rollouts(rollout("a", task_id="gone")), TASKS, scores(), columns=["answer"], info_columns=INFO)


def test_components_are_current_values_and_rows_without_a_score_are_null():
    given = scores(("a", "right", 0.0, 1.0, 1), ("a", "right", 1.0, 1.0, 2), ("z", "right", 5.0, 1.0, 1))
    rows = rollouts(rollout("b"), rollout("a"))
    found = build_frame(rows, TASKS, given, columns=["right", "late"], info_columns={})
    assert found["right"].to_list() == [None, 1.0]
    assert found["late"].to_list() == [None, None]
    assert found.schema["late"] == pl.Float64


def test_the_reward_is_the_weighted_sum_of_current_components():
    given = scores(
        ("sum", "right", 1.0, 1.0, 1), ("sum", "style", 0.5, 0.2, 1), ("sum", "metric", 9.0, None, 1),
        ("sum", "zero", 9.0, 0.0, 1),
        ("null", "right", 1.0, 1.0, 1), ("null", "style", None, 0.2, 1),
        ("metric_null", "right", 1.0, 2.0, 1), ("metric_null", "metric", None, None, 1),
        ("only_metric", "metric", 1.0, None, 1),
        ("newer", "right", 1.0, 1.0, 1), ("newer", "right", 0.25, 1.0, 3),
    )  # fmt: skip
    found = {row[0]: row[1:] for row in current_reward(pl.DataFrame(pl.from_arrow(given))).rows()}
    assert found["sum"] == (pytest.approx(1.1), '{"right": 1, "style": 1}')  # 1·1 + 0.2·0.5
    assert found["null"] == (None, '{"right": 1, "style": 1}')
    assert found["metric_null"] == (2.0, '{"right": 1}')
    assert found["only_metric"] == (None, "{}")
    assert found["newer"] == (0.25, '{"right": 3}')


def test_score_versions_are_json_for_any_component_name():
    name = 'quote " and \\ and ü'
    found = current_reward(pl.DataFrame(pl.from_arrow(scores(("a", name, 1.0, 1.0, 4)))))
    assert json.loads(found["score_versions_json"][0]) == {name: 4}


def test_a_failed_rollout_has_no_reward_whatever_its_scores_say():
    rows = rollouts(rollout("a", error="timeout: 3 s"), rollout("b"), rollout("c"))
    given = scores(("a", "right", 1.0, 1.0, 1), ("b", "right", 1.0, 1.0, 1))
    found = build_frame(rows, TASKS, given, columns=["reward"], info_columns={})
    assert found.columns == ["experience_id", "task_id", "group_id", "reward"]
    assert found["reward"].to_list() == [None, 1.0, None]
