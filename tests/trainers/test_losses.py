"""Losses on numbers that a person can work out: the fixture has ratios e^.2 = 1.221403 and e^−.2 = .818731."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_engine.errors import SchemaError
from trainers.algorithms.base import Denominators, LossInputs
from trainers.algorithms.evaluate import LossFixture, evaluate_loss
from trainers.algorithms.grpo import GRPO, GRPOConfig, OffPolicyConfig
from trainers.algorithms.sft import SFTConfig
from trainers.losses.aggregate import aggregate
from trainers.losses.kl import ESTIMATORS, kl_estimate

FIXTURE = LossFixture(
    logprobs=[[-1.0, -0.5]],
    old_logprobs=[[-1.2, -0.3]],
    advantages=[[1.0, -1.0]],
    reference_logprobs=[[-0.9, -0.6]],
)


def grpo(**fields: Any) -> GRPOConfig:
    return GRPOConfig.model_validate({"type": "grpo", **fields})


def one_token(ratio: float, advantage: float, **fields: Any) -> tuple[float, float]:
    """Loss and gradient by ℓ of a single token with this ratio."""
    result = evaluate_loss(grpo(**fields), LossFixture([[math.log(ratio)]], [[0.0]], [[advantage]]))
    return result.loss, result.gradient[0][0]


def test_clipped_loss_of_the_fixture() -> None:
    # max(−1.221403, −1.2) = −1.2 and max(.818731, .8) = .818731; their mean is −.190635
    result = evaluate_loss(grpo(), FIXTURE)
    assert result.loss == pytest.approx(-0.190635, abs=1e-6)
    assert result.per_token == [[pytest.approx(-1.2), pytest.approx(0.818731, abs=1e-6)]]
    assert result.metrics["clip_fraction"] == 0.5


def test_a_higher_upper_clip_lets_the_first_token_through() -> None:
    # 1.221403 is below 1.28: (−1.221403 + .818731) / 2 = −.201336, the unclipped value
    assert evaluate_loss(grpo(clip=[0.2, 0.28]), FIXTURE).loss == pytest.approx(-0.201336, abs=1e-6)


def test_unlikely_ratios_need_the_clip_only_on_the_side_that_would_gain() -> None:
    # (ratio, advantage) → loss, gradient: clipped above for A > 0, below for A < 0, pessimistic elsewhere.
    assert one_token(1.5, 1.0) == pytest.approx((-1.2, 0.0))
    assert one_token(0.5, 1.0) == pytest.approx((-0.5, -0.5))
    assert one_token(0.5, -1.0) == pytest.approx((0.8, 0.0))
    assert one_token(1.5, -1.0) == pytest.approx((1.5, 1.5))


def test_clip_bounds_are_asymmetric() -> None:
    assert one_token(1.5, 1.0, clip=[0.1, 0.4]) == pytest.approx((-1.4, 0.0))
    assert one_token(0.5, -1.0, clip=[0.1, 0.4]) == pytest.approx((0.9, 0.0))


def test_dual_clip_bounds_negative_advantages_only() -> None:
    assert one_token(5.0, -2.0) == pytest.approx((6.0, 0.0))  # min(2 · 5, 2 · 3)
    assert one_token(2.9, -2.0) == pytest.approx((5.8, 5.8))
    assert one_token(5.0, -2.0, dual_clip=None) == pytest.approx((10.0, 10.0))
    assert one_token(5.0, 2.0) == pytest.approx((-2.4, 0.0))


def test_sft_is_the_mean_negative_log_likelihood() -> None:
    assert evaluate_loss(SFTConfig(), FIXTURE).loss == pytest.approx(0.75)


def test_a_log_ratio_beyond_twenty_stays_finite() -> None:
    result = evaluate_loss(grpo(dual_clip=None), LossFixture([[-1.0]], [[-500.0]], [[-1.0]]))
    assert result.loss == pytest.approx(math.exp(20.0))


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # δ = −.1 and +.1: k1 mean 0; k2 .005; k3 (e^.1 − 1 − .1 + e^−.1 − 1 + .1)/2 = .005004; abs .1
        ("k1", 0.0), ("k2", 0.005), ("k3", 0.0050042), ("low_var_kl", 0.0050042), ("abs", 0.1),
        ("k1+", 0.0), ("k3+", 0.0050042),
    ],
)  # fmt: skip
def test_kl_estimates_of_the_fixture(estimator: str, expected: float) -> None:
    result = evaluate_loss(grpo(kl={"estimator": estimator, "coefficient": 1.0}), FIXTURE)
    assert result.metrics["kl"] == pytest.approx(expected, abs=1e-7)
    assert result.loss == pytest.approx(-0.190635 + expected, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "gradient"),
    # d/dδ at δ = −.1: k1 1; k2 δ = −.1; k3 1 − e^.1 = −.105171; abs −1; the plus forms −.1
    [
        ("k1", 1.0), ("k2", -0.1), ("k3", -0.105171), ("low_var_kl", -0.105171), ("abs", -1.0),
        ("k1+", -0.1), ("k3+", -0.1),
    ],
)  # fmt: skip
def test_kl_gradients_and_straight_through_forms(estimator: Any, gradient: float) -> None:
    import torch

    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    kl_estimate(logprobs, torch.tensor([-0.9], dtype=torch.float64), estimator).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-6)


def test_low_variance_kl_is_bounded_where_k3_is_not() -> None:
    import torch

    far = torch.tensor([-30.0])
    assert kl_estimate(far, torch.zeros(1), "low_var_kl").item() == 10.0
    assert kl_estimate(far, torch.zeros(1), "k3").item() == pytest.approx(math.exp(20.0) - 31.0, rel=1e-6)
    with pytest.raises(ValueError, match="unknown KL estimator"):
        kl_estimate(far, far, "k9")  # pyright: ignore[reportArgumentType]
    assert "k9" not in ESTIMATORS


def test_kl_in_the_reward_is_no_part_of_the_loss() -> None:
    config = grpo(kl={"estimator": "k1", "coefficient": 1.0, "place": "reward"})
    assert evaluate_loss(config, FIXTURE).loss == pytest.approx(-0.190635, abs=1e-6)
    assert config.needs.reward_penalty


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("token_mean", 10 / 4),
        ("seq_mean_token_sum", (6 + 4) / 2),
        ("seq_mean_token_mean", (2 + 4) / 2),
        ("seq_mean_token_sum_norm", 5 / 3),
    ],
)
def test_aggregations_of_two_rows(how: Any, expected: float) -> None:
    # x = [[1, 2, 3], [4, ·, ·]]: SFT on ℓ = −x gives the values themselves
    fixture = LossFixture([[-1, -2, -3], [-4, -9, -9]], loss_mask=[[1, 1, 1], [1, 0, 0]])
    config = SFTConfig(aggregate=how, loss_norm=3.0 if how.endswith("norm") else None)
    assert evaluate_loss(config, fixture).loss == pytest.approx(expected)


def test_a_row_without_a_trained_token_counts_in_no_denominator() -> None:
    fixture = LossFixture([[-1, -2, -3], [-4, -4, -4], [-4]], loss_mask=[[1, 1, 1], [0, 0, 0], [1]])
    assert evaluate_loss(SFTConfig(aggregate="seq_mean_token_mean"), fixture).loss == pytest.approx(3.0)
    assert evaluate_loss(SFTConfig(aggregate="seq_mean_token_sum"), fixture).loss == pytest.approx(5.0)


def test_a_row_weight_scales_its_tokens_only() -> None:
    fixture = LossFixture([[-1.0], [-3.0]], weights=[0.5, 1.0])
    assert evaluate_loss(SFTConfig(), fixture).loss == pytest.approx((0.5 + 3.0) / 2)


def test_masked_tokens_contribute_nothing_even_when_they_are_nan() -> None:
    nan = math.nan
    masked = LossFixture(
        [[nan, -1.0, -0.5]], [[nan, -1.2, -0.3]], [[nan, 1, -1]], [[nan, -0.9, -0.6]], loss_mask=[[0, 1, 1]]
    )
    masked = dataclasses.replace(masked, behaviour_logprobs=[[nan, -1.4, -0.2]])
    plain = dataclasses.replace(FIXTURE, behaviour_logprobs=[[-1.4, -0.2]])
    for fields in ({}, {"kl": {"estimator": "k3", "coefficient": 0.1}}, {"off_policy": {"level": "geometric"}}):
        with_mask, without = evaluate_loss(grpo(**fields), masked), evaluate_loss(grpo(**fields), plain)
        assert with_mask.loss == without.loss
        assert with_mask.gradient == [[0.0, *without.gradient[0]]]
        assert with_mask.metrics == without.metrics


def test_off_policy_weights_are_truncated_or_masked_and_carry_no_gradient() -> None:
    # π_old/μ = e^1 = 2.718 and e^−1 = .368; π_θ = π_old, A = 1: per token −w
    fixture = LossFixture([[-1.0, -1.0]], [[-1.0, -1.0]], [[1, 1]], behaviour_logprobs=[[-2.0, 0.0]])
    truncated = evaluate_loss(grpo(off_policy=OffPolicyConfig(treatment="truncate", high=2.0)), fixture)
    assert truncated.per_token[0] == pytest.approx([-2.0, -0.367879], abs=1e-6)
    assert truncated.gradient[0] == pytest.approx([-1.0, -0.183940], abs=1e-6)  # −w/2: as if w were a constant
    masked = evaluate_loss(grpo(off_policy=OffPolicyConfig(treatment="mask", low=0.5, high=5.0)), fixture)
    assert masked.per_token[0] == pytest.approx([-2.718282, 0.0], abs=1e-6)
    # One of the two tokens was capped, one of the two was zeroed.
    assert (truncated.metrics["off_policy_fraction"], masked.metrics["off_policy_fraction"]) == (0.5, 0.5)
    whole = evaluate_loss(grpo(off_policy=OffPolicyConfig(level="sequence")), fixture)
    assert whole.per_token[0] == pytest.approx([-1.0, -1.0])  # e^(1 − 1)
    assert whole.metrics["off_policy_fraction"] == 0.0


def test_off_policy_weights_of_a_row_ignore_its_masked_tokens_and_other_rows() -> None:
    # Row 0: log-weights .6 and .2 (and 9 where masked): product e^.8 = 2.225541, geometric mean e^.4 = 1.491825.
    # Row 1: −1 alone: e^−1 = .367879.
    fixture = LossFixture(
        [[-1.0, -1.0, -1.0], [-2.0]], [[-1.0, -1.0, -1.0], [-2.0]], [[1, 1, 1], [1]],
        behaviour_logprobs=[[-1.6, -10.0, -1.2], [-1.0]], loss_mask=[[1, 0, 1], [1]],
    )  # fmt: skip
    product = evaluate_loss(grpo(off_policy={"level": "sequence", "high": 5.0}), fixture)
    assert product.per_token == [
        pytest.approx([-2.225541, 0.0, -2.225541], abs=1e-6),
        pytest.approx([-0.367879], abs=1e-6),
    ]
    geometric = evaluate_loss(grpo(off_policy={"level": "geometric", "high": 5.0}), fixture)
    assert geometric.per_token == [
        pytest.approx([-1.491825, 0.0, -1.491825], abs=1e-6),
        pytest.approx([-0.367879], abs=1e-6),
    ]
    window = evaluate_loss(grpo(off_policy={"level": "geometric", "treatment": "mask", "low": 0.5}), fixture)
    assert window.per_token[1] == [0.0]
    assert window.metrics["off_policy_fraction"] == pytest.approx(1 / 3)


def test_the_correction_weighs_the_policy_term_and_not_the_kl_term() -> None:
    # w = e^.5 = 1.648721, A = 1, ratio 1: −1.648721; k2 = .1²/2 = .005 with coefficient 2 adds .01.
    fixture = LossFixture([[-1.0]], [[-1.0]], [[1]], [[-1.1]], behaviour_logprobs=[[-1.5]])
    result = evaluate_loss(grpo(off_policy={}, kl={"estimator": "k2", "coefficient": 2.0}), fixture)
    assert result.loss == pytest.approx(-1.648721 + 0.01, abs=1e-6)
    assert result.metrics["kl"] == pytest.approx(0.005)


def test_a_correction_beyond_twenty_nats_stays_finite() -> None:
    fixture = LossFixture([[-1.0]], [[-1.0]], [[-1.0]], behaviour_logprobs=[[-900.0]])
    result = evaluate_loss(grpo(off_policy={"high": 1e12}), fixture)
    assert result.loss == pytest.approx(math.exp(20.0))


def test_dr_grpo_on_two_rows() -> None:
    # Σ over both rows of −A·r, by 2 rows and 4 tokens: −(3·1 + 1·(−2)) / 8 = −.125
    fixture = LossFixture([[-1.0] * 3, [-1.0]], [[-1.0] * 3, [-1.0]], [[1, 1, 1], [-2]])
    assert evaluate_loss(grpo(aggregate="seq_mean_token_sum_norm", loss_norm=4), fixture).loss == pytest.approx(-0.125)


def test_missing_inputs_and_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="grpo needs behaviour log-probs"):
        evaluate_loss(grpo(), LossFixture([[-1.0]]))
    with pytest.raises(SchemaError, match="old_logprobs has rows of"):
        evaluate_loss(grpo(), LossFixture([[-1.0]], [[-1.0, 2.0]]))
    with pytest.raises(ValueError, match="needs loss_norm"):
        grpo(aggregate="seq_mean_token_sum_norm")
    with pytest.raises(ValueError, match="do not take it"):
        grpo(loss_norm=3.0)
    with pytest.raises(ValueError, match=r"low \(5.0\) must be below high \(2.0\)"):
        grpo(off_policy={"treatment": "mask", "low": 5.0})
    with pytest.raises(ValueError, match="advantage constant does not look at rewards"):
        grpo(advantage={"type": "constant"}, kl={"estimator": "k1", "place": "reward"})


def test_what_an_algorithm_needs_follows_from_its_advantage_and_kl() -> None:
    assert (grpo().needs_reward, grpo().needs_groups, grpo().needs_reference) == (True, True, False)
    constant = grpo(advantage={"type": "constant"}, kl={"estimator": "k2"})
    assert (constant.needs_reward, constant.needs_groups, constant.needs_reference) == (False, False, True)
    assert not SFTConfig().needs_logprobs
    assert SFTConfig().advantage is None


AGGREGATIONS = ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_split_into_micro_batches_has_the_same_loss_and_gradient(data: st.DataObject) -> None:
    import torch

    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=7), label="lengths")
    how = data.draw(st.sampled_from(AGGREGATIONS), label="aggregate")
    parts = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)), label="micro-batch")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9999), label="seed"))
    level = data.draw(st.sampled_from([None, "token", "sequence", "geometric"]), label="off-policy level")
    algorithm = GRPO(
        grpo(
            aggregate=how,
            loss_norm=4.0 if how.endswith("norm") else None,
            kl={"estimator": "k3", "coefficient": 0.3},
            off_policy=None if level is None else {"level": level},
        )
    )
    total = sum(lengths)
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    logprobs, old, reference, behaviour = (
        torch.randn(total, generator=generator, dtype=torch.float64) - 2 for _ in range(4)
    )
    advantages = torch.randn(total, generator=generator, dtype=torch.float64)
    mask = torch.rand(total, generator=generator) > 0.3
    mask[0] = True
    tokens = torch.zeros(len(lengths), dtype=torch.int64).index_add_(0, row, mask.long())
    denominators = algorithm.denominators(tokens.numpy())

    def run(members: list[int]) -> tuple[float, Any]:
        chosen = torch.isin(row, torch.tensor(members))
        leaf = logprobs.clone().requires_grad_()
        new_row = torch.searchsorted(torch.tensor(members), row[chosen])
        inputs = LossInputs(
            logprobs=leaf[chosen],
            loss_mask=mask[chosen],
            row=new_row,
            row_count=len(members),
            weights=torch.ones(int(chosen.sum()), dtype=torch.float64),
            old_logprobs=old[chosen],
            advantages=advantages[chosen],
            behaviour_logprobs=behaviour[chosen],
            reference_logprobs=reference[chosen],
        )
        output = algorithm.loss(inputs, denominators)
        output.loss.backward()
        return float(output.loss.detach()), leaf.grad

    whole_loss, whole_gradient = run(list(range(len(lengths))))
    split = [run([r for r, own in enumerate(parts) if own == part]) for part in sorted(set(parts))]
    assert sum(loss for loss, _ in split) == pytest.approx(whole_loss, abs=1e-12)
    torch.testing.assert_close(sum(gradient for _, gradient in split), whole_gradient, atol=1e-12, rtol=1e-12)


def test_a_denominator_of_the_micro_batch_would_be_another_loss() -> None:
    import torch

    values, mask = torch.tensor([1.0, 2.0, 3.0]), torch.ones(3, dtype=torch.bool)
    row, counts = torch.zeros(3, dtype=torch.int64), torch.tensor([3])
    whole = Denominators(tokens=4, rows=2)
    part = aggregate(values, mask, row, counts, how="token_mean", tokens=whole.tokens, rows=whole.rows)
    assert part.item() == pytest.approx(6 / 4)
