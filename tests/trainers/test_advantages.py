"""Advantages: golden values and the ways a baseline goes wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_engine.errors import SchemaError
from trainers.advantages import compute_advantages
from trainers.advantages.constant import ConstantAdvantageConfig
from trainers.advantages.group import GroupAdvantageConfig
from trainers.advantages.rloo import RlooAdvantageConfig


def frame(
    rewards: Sequence[float | None], *, groups: list[str] | None = None, errors: list[str | None] | None = None
) -> pl.DataFrame:
    count = len(rewards)
    return pl.DataFrame(
        {
            "experience_id": [f"x{index}" for index in range(count)],
            "group_id": groups or ["g"] * count,
            "reward": rewards,
            "error": errors or [None] * count,
        },
        schema={"experience_id": pl.String, "group_id": pl.String, "reward": pl.Float64, "error": pl.String},
    )


FIXTURE = [1.0, 0.0, 0.0, 0.5]  # mean 0.375; deviations .625 −.375 −.375 .125; Σ² = .6875; s = √(.6875/3) = .478714


def test_group_divides_by_the_sample_deviation() -> None:
    result = compute_advantages(GroupAdvantageConfig(), frame(FIXTURE))
    assert result.advantages.dtype == pl.Float64
    assert result.advantages.to_list() == pytest.approx([1.30558, -0.78335, -0.78335, 0.26112], abs=5e-6)


def test_group_without_scale_only_centres() -> None:
    result = compute_advantages(GroupAdvantageConfig(scale="none"), frame(FIXTURE))
    assert result.advantages.to_list() == pytest.approx([0.625, -0.375, -0.375, 0.125])


def test_group_with_batch_scale_divides_by_the_deviation_of_all_rewards() -> None:
    # rewards 0 1 2 4: mean 1.75, Σ² = 3.0625 + .5625 + .0625 + 5.0625 = 8.75, s = √(8.75/3) = 1.707825
    result = compute_advantages(
        GroupAdvantageConfig(scale="batch", epsilon=0), frame([0, 1, 2, 4], groups=["a", "a", "b", "b"])
    )
    assert result.advantages.to_list() == pytest.approx([-0.292770, 0.292770, -0.585540, 0.585540], abs=1e-6)


def test_rloo_compares_with_the_others() -> None:
    result = compute_advantages(RlooAdvantageConfig(), frame(FIXTURE))
    assert result.advantages.to_list() == pytest.approx([5 / 6, -0.5, -0.5, 1 / 6])


def test_constant_ignores_rewards() -> None:
    result = compute_advantages(
        ConstantAdvantageConfig(value=2.0), frame([None, 5.0, 1.0], errors=[None, None, "timeout: 3 s"])
    )
    assert result.advantages.to_list() == [2.0, 2.0, None]


def test_a_null_reward_is_not_a_zero() -> None:
    # Valid rewards 1 and 0: mean .5, sample deviation √.5. A null read as 0 would give a mean of 1/3.
    result = compute_advantages(GroupAdvantageConfig(), frame([1.0, None, 0.0]))
    assert result.advantages[1] is None
    assert [result.advantages[0], result.advantages[2]] == pytest.approx([0.707106, -0.707106], abs=2e-6)
    assert result.counts["unscored"] == 1


def test_a_row_with_an_error_stays_out_of_the_baseline_even_with_a_reward() -> None:
    result = compute_advantages(RlooAdvantageConfig(), frame([1.0, 0.0, 9.0], errors=[None, None, "engine: lost"]))
    assert result.advantages.to_list() == [1.0, -1.0, None]


@pytest.mark.parametrize("config", [GroupAdvantageConfig(), GroupAdvantageConfig(scale="none"), RlooAdvantageConfig()])
def test_a_single_valid_row_has_advantage_zero_not_its_reward(config: GroupAdvantageConfig) -> None:
    result = compute_advantages(config, frame([0.7, None], groups=["g", "g"]))
    assert result.advantages.to_list() == [0.0, None]
    assert result.counts == {"unscored": 1, "singleton": 1, "zero_variance": 0}


@pytest.mark.parametrize("config", [GroupAdvantageConfig(), GroupAdvantageConfig(scale="none"), RlooAdvantageConfig()])
def test_eight_rewards_of_a_tenth_are_zero_variance(config: GroupAdvantageConfig) -> None:
    # Their float32 standard deviation is above 0, and their sum is not 8 · 0.1.
    result = compute_advantages(config, frame([0.1] * 8))
    assert result.advantages.to_list() == [0.0] * 8
    assert result.counts["zero_variance"] == 8


def test_rewards_that_differ_by_rounding_are_zero_variance_and_a_real_difference_is_not() -> None:
    assert compute_advantages(GroupAdvantageConfig(), frame([0.3, 0.1 + 0.2])).counts["zero_variance"] == 2
    small = compute_advantages(GroupAdvantageConfig(scale="none"), frame([0.0, 1e-6]))
    assert small.advantages.to_list() == pytest.approx([-5e-7, 5e-7])


def test_the_tolerance_for_equal_rewards_grows_with_them() -> None:
    # 1e-9 of a mean near 1e9 is 1: a range of .5 is rounding of the scale, a range of 2 is a difference.
    near = compute_advantages(GroupAdvantageConfig(scale="none"), frame([1e9, 1e9 + 0.5]))
    assert (near.advantages.to_list(), near.counts["zero_variance"]) == ([0.0, 0.0], 2)
    apart = compute_advantages(GroupAdvantageConfig(scale="none"), frame([-1e9, -1e9 - 2.0]))
    assert apart.advantages.to_list() == [1.0, -1.0]


def test_batch_scale_counts_valid_rewards_only_and_flat_groups_among_them() -> None:
    # Valid: 0, 1 | 3, 3: mean 1.75, Σ² = 3.0625 + .5625 + 2 · 1.5625 = 6.75, s = 1.5; centred −.5, .5 | 0, 0.
    result = compute_advantages(
        GroupAdvantageConfig(scale="batch", epsilon=0),
        frame([0, 1, 3, 3, None, 70], groups=list("aabbab"), errors=[None] * 5 + ["timeout: 3 s"]),
    )
    assert result.advantages.to_list() == [pytest.approx(-1 / 3), pytest.approx(1 / 3), 0.0, 0.0, None, None]
    assert result.counts == {"unscored": 2, "singleton": 0, "zero_variance": 2}


def test_a_group_without_a_score_has_no_advantage_and_harms_no_other() -> None:
    result = compute_advantages(RlooAdvantageConfig(), frame([None, None, 1.0, 0.0], groups=list("aabb")))
    assert result.advantages.to_list() == [None, None, 1.0, -1.0]
    assert result.counts == {"unscored": 2, "singleton": 0, "zero_variance": 0}


def test_groups_are_told_apart_by_id_wherever_their_rows_stand() -> None:
    result = compute_advantages(RlooAdvantageConfig(), frame([1.0, 10.0, 0.0, 30.0], groups=["a", "b", "a", "b"]))
    assert result.advantages.to_list() == [1.0, -20.0, -1.0, 20.0]


def test_rows_that_cannot_be_compared_are_refused_by_name() -> None:
    with pytest.raises(SchemaError, match="reward of row x1 is nan"):
        compute_advantages(GroupAdvantageConfig(), frame([1.0, math.nan]))
    with pytest.raises(SchemaError, match="group_id not among them"):
        compute_advantages(GroupAdvantageConfig(), frame([1.0]).drop("group_id"))
    with pytest.raises(SchemaError, match="row x0 is in the frame more than once"):
        compute_advantages(GroupAdvantageConfig(), pl.concat([frame([1.0]), frame([2.0])]))


rewards = st.lists(
    st.tuples(st.sampled_from("abc"), st.one_of(st.none(), st.integers(-5, 5).map(float))), min_size=1, max_size=24
)


@settings(max_examples=60, deadline=None)
@given(rewards, st.randoms(use_true_random=False))
def test_advantages_of_a_group_sum_to_zero_and_do_not_depend_on_row_order(
    rows: list[tuple[str, float | None]], order: random.Random
) -> None:
    made = frame([reward for _, reward in rows], groups=[group for group, _ in rows])
    for config in (GroupAdvantageConfig(), RlooAdvantageConfig()):
        result = made.with_columns(compute_advantages(config, made).advantages.alias("advantage"))
        for total in result.group_by("group_id").agg(pl.col("advantage").sum())["advantage"]:
            assert total == pytest.approx(0.0, abs=1e-9)
        shuffled = made.sample(fraction=1.0, shuffle=True, seed=order.randint(0, 1000))
        again = shuffled.with_columns(compute_advantages(config, shuffled).advantages.alias("other"))
        both = result.join(again, on="experience_id")
        assert both["advantage"].to_list() == pytest.approx(both["other"].to_list(), abs=1e-12, nan_ok=False)
