"""Operators on groups, rewards and the choice of rows, worked out by hand."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_rows import CONTEXT, apply, config, details, frame, reasons
from pydantic import ValidationError

from buffer_engine.errors import OperatorError
from operators.base import Context


def test_dynamic_sampling_keeps_groups_that_are_neither_all_right_nor_all_wrong():
    rows = frame(
        {
            "group_id": ["right", "right", "wrong", "wrong", "mixed", "mixed", "mixed", "one"],
            "right": [1.0, 1.0, 0.5, 0.0, 1.0, 0.0, None, 1.0],
        }
    )
    result = apply("dynamic_sampling", rows, column="right")
    assert reasons(result) == {
        0: "all_right", 1: "all_right", 2: "all_wrong", 3: "all_wrong", 6: "null", 7: "all_right",
    }  # fmt: skip
    assert details(result)[0] == "2 of 2 right"
    assert details(result)[2] == "0 of 2 right"
    assert reasons(apply("dynamic_sampling", rows, column="right", threshold=0.5)) == {
        0: "all_right", 1: "all_right", 6: "null", 7: "all_right",
    }  # fmt: skip


def test_dynamic_sampling_over_all_counts_rows_that_are_out():
    rows = frame({"right": [1.0, 1.0, 0.0], "alive": [True, True, False]})
    assert reasons(apply("dynamic_sampling", rows, column="right", over="all")) == {}
    assert reasons(apply("dynamic_sampling", rows.filter("alive"), column="right")) == {0: "all_right", 1: "all_right"}


def test_group_complete_counts_samples_not_turns():
    rows = frame(
        {
            "group_id": ["a", "a", "a", "b", "b", "b"],
            "sample_index": [0, 0, 2, 0, 1, 2],
            "group_size": [3, 3, 3, 3, 3, 3],
        }
    )
    result = apply("group_complete", rows)
    assert reasons(result) == {0: "incomplete", 1: "incomplete", 2: "incomplete"}
    assert details(result)[0] == "2 of 3 samples"
    held = apply("group_complete", rows, verdict="hold", min=3)
    assert held.verdicts is not None
    assert held.verdicts["verdict"].to_list() == ["hold"] * 3
    surplus = apply("group_complete", rows, min=1, max=2)
    assert reasons(surplus) == {5: "surplus"}
    assert details(surplus)[5] == "sample 3 of at most 2"


def test_group_complete_over_all_misses_only_what_never_arrived():
    rows = frame({"sample_index": [0, 1], "group_size": [2, 2], "alive": [True, False]})
    assert reasons(apply("group_complete", rows, over="all")) == {}
    assert reasons(apply("group_complete", rows.filter("alive"))) == {0: "incomplete"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"min": 0.2, "max": 0.8}, {3: "too_low", 4: "too_low", 5: "null"}),  # means 0.5 and 0
        ({"statistic": "max", "min": 1}, {3: "too_low", 4: "too_low", 5: "null"}),
        ({"statistic": "range", "max": 0.5}, {0: "too_high", 1: "too_high", 2: "too_high", 5: "null"}),
        ({"statistic": "median", "max": 0.4}, {0: "too_high", 1: "too_high", 2: "too_high", 5: "null"}),
        ({"statistic": "min", "min": 0}, {5: "null"}),
    ],
)
def test_group_reward_range_holds_a_statistic_against_its_limits(fields, expected):
    rows = frame({"group_id": ["a", "a", "a", "b", "b", "b"], "reward": [0.0, 0.5, 1.0, 0.0, 0.0, None]})
    assert reasons(apply("group_reward_range", rows, **fields)) == expected


def test_group_reward_range_says_the_number():
    rows = frame({"reward": [0.0, 0.5]})
    assert details(apply("group_reward_range", rows, max=0.2))[0] == "mean of the group 0.25 > max 0.2"


def test_pass_rate_gives_the_share_and_wilsons_interval():
    rows = frame({"group_id": ["a", "a", "b", "b"], "task_id": ["t"] * 4, "right": [1.0, 0.0, None, 1.0]})
    by_group = apply("pass_rate", rows, column="right").scores
    assert by_group["pass_rate"].to_list() == [0.5, 0.5, 1.0, 1.0]
    assert by_group["pass_rate_n"].to_list() == [2, 2, 1, 1]
    # n = 2, p = 1/2, z = 1.96: centre 0.5; half = z/(1 + z²/2) · sqrt(1/8 + z²/16) = 0.40546
    assert by_group["pass_rate_low"][0] == pytest.approx(0.09454, abs=1e-4)
    assert by_group["pass_rate_high"][0] == pytest.approx(0.90546, abs=1e-4)
    assert by_group["pass_rate_high"][2] == pytest.approx(1.0)
    by_task = apply("pass_rate", rows, column="right", by="task").scores
    assert by_task["pass_rate"].to_list() == pytest.approx([2 / 3] * 4)
    nothing = apply("pass_rate", frame({"right": [None]}, {"right": pl.Float64}), column="right").scores
    assert {name: values[0] for name, values in nothing.items()} == {
        "pass_rate": None, "pass_rate_n": 0.0, "pass_rate_low": None, "pass_rate_high": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        # 1, 2, 6: mean 3, sample deviation sqrt((4 + 1 + 9) / 2) = sqrt 7
        ("zscore", [-2 / 7**0.5, -1 / 7**0.5, 3 / 7**0.5, None, 0.0]),
        ("minmax", [0.0, 0.2, 1.0, None, 0.0]),
        ("rank", [0.0, 0.5, 1.0, None, 0.5]),
        ("leave_one_out", [1 - 4, 2 - 3.5, 6 - 1.5, None, 0.0]),
    ],
)
def test_reward_normalize_compares_within_the_group(method, expected):
    rows = frame({"group_id": ["a", "a", "a", "a", "b"], "raw": [1.0, 2.0, 6.0, None, 9.0]})
    result = apply("reward_normalize", rows, column="raw", method=method, eps=0)
    assert result.scores["reward_normalize"].to_list() == pytest.approx(expected)


def test_reward_normalize_shares_ranks_and_can_compare_the_batch():
    rows = frame({"group_id": ["a", "b", "b"], "raw": [2.0, 2.0, 5.0]})
    ranked = apply("reward_normalize", rows, column="raw", method="rank", by="batch")
    assert ranked.scores["reward_normalize"].to_list() == [0.25, 0.25, 1.0]  # ranks 1.5, 1.5, 3
    flat = apply("reward_normalize", frame({"raw": [0.1 + 0.2, 0.3]}), column="raw")
    assert flat.scores["reward_normalize"].to_list() == [0.0, 0.0]


def rewards(tmp_path, text):
    file = tmp_path / "rewards.csv"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_reward_inject_finds_rewards_by_id(tmp_path):
    path = rewards(tmp_path, "experience_id,reward,said\nx0,1.5,good\nx1,,odd\nother,9,\n")
    rows = frame({"n": [1, 2, 3]})
    skipped = apply("reward_inject", rows, id="human", path=path, comment="said")
    assert skipped.scores["human"].to_list() == [1.5, None, None]
    assert skipped.scored is not None
    assert skipped.scored.to_list() == [True, True, False]
    assert skipped.comments == {0: "good", 1: "odd"}
    assert apply("reward_inject", rows, path=path, missing="null").scored is None
    rejected = apply("reward_inject", rows, path=path, missing="reject")
    assert reasons(rejected) == {2: "no_reward"}
    assert details(rejected) == {2: "no line for experience_id x2"}
    held = apply("reward_inject", rows, path=path, missing="hold")
    assert held.verdicts is not None
    assert held.verdicts["verdict"].to_list() == ["hold"]


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({"conflicts": "last", "order": "day"}, 1.0),
        ({"conflicts": "mean"}, 3.0),
        ({"conflicts": "min"}, 1.0),
        ({"conflicts": "max"}, 5.0),
    ],
)
def test_reward_inject_settles_conflicts_as_it_is_told(tmp_path, fields, value):
    path = rewards(tmp_path, "task,reward,day\nt0,5,1\nt0,1,2\n")
    rows = frame({"n": [1, 2]})
    result = apply("reward_inject", rows, path=path, on="task_id", key="task", **fields)
    assert result.scores["reward_inject"].to_list() == [value, value]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("experience_id,reward\nx0,1\nx0,2\n", r"'x0' has several rewards, \[1.0, 2.0\]"),
        ("experience_id,reward\nx0,NaN\n", "the reward of 'x0' is nan, no number"),
        ("experience_id,reward\n,1\n", "1 lines have no 'experience_id'"),
        ("experience_id,reward\nx0,good\n", "column 'reward' is String, no number"),
        ("experience_id,rewrad\nx0,1\n", "no column 'reward' → did you mean 'rewrad'"),
        ("experience_id,reward\n7,1\n", "its key is Int64, the rows' 'experience_id' is String"),
    ],
)
def test_reward_inject_says_what_is_wrong_with_the_file(tmp_path, text, complaint):
    with pytest.raises(OperatorError, match=complaint):
        apply("reward_inject", frame({"n": [1]}), path=rewards(tmp_path, text))


def test_reward_inject_takes_equal_lines_for_one(tmp_path):
    path = rewards(tmp_path, "experience_id,reward\nx0,1\nx0,1\n")
    assert apply("reward_inject", frame({"n": [1]}), path=path).scores["reward_inject"].to_list() == [1.0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"method": "last"}, [0.0, 0.0, 8.0, 3.0, None, None]),
        ({"method": "uniform"}, [8 / 3, 8 / 3, 8 / 3, 3.0, None, None]),
        ({"method": "same"}, [8.0, 8.0, 8.0, 3.0, None, None]),
        ({"gamma": 0.5}, [2.0, 4.0, 8.0, 3.0, None, None]),
    ],
)
def test_credit_assign_spreads_the_outcome_of_the_last_turn(fields, expected):
    rows = frame(
        {
            "sample_index": [0, 0, 0, 1, 2, 2],
            "attempt": [0] * 6,
            "turn_index": [0, 2, 5, 0, 0, 1],
            "outcome": [9.0, None, 8.0, 3.0, 7.0, None],
        }
    )
    result = apply("credit_assign", rows, column="outcome", **fields)
    assert result.scores["credit_assign"].to_list() == pytest.approx(expected)
    backwards = apply("credit_assign", rows.reverse(), column="outcome", **fields)
    assert backwards.scores["credit_assign"].to_list() == pytest.approx(expected[::-1])
    with pytest.raises(ValidationError, match="needs `gamma`"):
        config("credit_assign", column="outcome")


def drawn(rows, context=CONTEXT, **fields):
    result = apply("balance_sample", rows, context, **fields)
    out = set(reasons(result))
    return [row for row in range(rows.height) if row not in out], reasons(result)


def test_balance_sample_keeps_the_shares_that_were_asked_for():
    rows = frame({"kind": ["a"] * 6 + ["b"] * 3 + ["c", None], "sample_index": [0] * 11})
    kept, why = drawn(rows, by="kind", target={"a": 2, "b": 1}, unit="row")
    # b can deliver 3, so a gives 6 of its 6
    assert kept == list(range(9))
    assert why == {9: "no_target", 10: "no_target"}
    kept, why = drawn(rows, by="kind", target={"a": 1, "b": 1}, unit="row", max_units=5)
    # 2.5 each: the half that is over goes to a, the first of equals
    assert len([row for row in kept if row < 6]) == 3
    assert len([row for row in kept if 6 <= row < 9]) == 2
    assert {why[row] for row in why if row < 9} == {"not_drawn"}
    equal, _ = drawn(rows.head(9), by="kind", unit="row")
    assert len(equal) == 6


def test_balance_sample_draws_whole_groups_the_same_in_any_order():
    groups = [f"g{row // 2}" for row in range(20)]
    rows = frame({"group_id": groups, "kind": ["a", "b"] * 10, "sample_index": [0, 1] * 10})
    kept, _ = drawn(rows, by="kind", max_units=4)
    assert len(kept) == 8
    assert len({groups[row] for row in kept}) == 4  # every group has the value of its first sample, a
    again, _ = drawn(rows.reverse(), by="kind", max_units=4)
    assert sorted(19 - row for row in again) == kept
    other, _ = drawn(rows, Context(seed=2, model_version=1, step=1), by="kind", max_units=4)
    assert other != kept


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from("aabbc"), min_size=1, max_size=40), st.integers(1, 50))
def test_balance_sample_never_exceeds_a_share_by_a_unit(kinds, most):
    rows = frame({"kind": kinds, "sample_index": [0] * len(kinds)})
    kept, _ = drawn(rows, by="kind", unit="row", max_units=most)
    counts = [sum(kinds[row] == kind for row in kept) for kind in set(kinds)]
    assert sum(counts) <= most
    assert max(counts) - min(counts) <= 1


def test_curriculum_numbers_groups_from_easy_to_hard():
    rows = frame({"group_id": ["m", "e", "h", "m", "n"], "level": [2.0, 1.0, 9.0, 4.0, None]})
    # e 1, m 3, h 9: places 0, 1/3, 2/3
    result = apply("curriculum", rows, expr="level")
    assert result.scores["curriculum"].to_list() == pytest.approx([1 / 3, 0, 2 / 3, 1 / 3, None])
    assert reasons(result) == {4: "null"}
    hard = apply("curriculum", rows, expr="level", order="hard_first")
    assert hard.scores["curriculum"].to_list() == pytest.approx([1 / 3, 2 / 3, 0, 1 / 3, None])


def test_curriculum_rejects_outside_a_band_and_beyond_k():
    rows = frame({"group_id": list("abcd"), "rate": [1.0, 0.5, 0.0, 0.25]})
    band = apply("curriculum", rows, expr="1 - rate", method="band", low=0.2, high=0.8)
    assert reasons(band) == {0: "too_easy", 2: "too_hard"}
    assert details(band) == {0: "difficulty 0.0", 2: "difficulty 1.0"}
    top = apply("curriculum", rows, expr="1 - rate", method="top_k", k=2)
    assert reasons(top) == {2: "beyond_k", 3: "beyond_k"}
    assert details(top) == {2: "number 4 of 4", 3: "number 3 of 4"}


def test_curriculum_folds_into_layers_that_each_run_from_easy_to_hard():
    rows = frame({"group_id": list("abcde"), "level": [1, 2, 3, 4, 5]})
    result = apply("curriculum", rows, expr="level", method="fold", layers=2)
    # layer 0: 1 3 5, layer 1: 2 4 → places of 1 2 3 4 5 are 0 3 1 4 2
    assert result.scores["curriculum"].to_list() == pytest.approx([0, 0.6, 0.2, 0.8, 0.4])
    for wrong, said in (({"method": "band"}, "needs low or high"), ({"k": 2}, "k means nothing to method sort")):
        with pytest.raises(ValidationError, match=said):
            config("curriculum", expr="level", **wrong)
