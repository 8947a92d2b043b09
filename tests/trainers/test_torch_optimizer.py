"""AdamW on two weights, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainers.torch_config import OptimizerConfig
from trainers.torch_optimizer import Optimizer


def two_weights(**fields: Any) -> tuple[torch.Tensor, Optimizer]:
    weights = torch.nn.Parameter(torch.tensor([2.0, -1.0]))
    return weights, Optimizer(OptimizerConfig.model_validate(fields), {"w": weights})


def test_the_first_step_goes_by_the_sign_and_decay_is_apart_from_the_gradient() -> None:
    # m̂ = g and v̂ = g², so each weight moves by rate · g/|g| = .1; decay takes .1 · .5 of the weight first:
    # 2 · .95 − .1 = 1.8 and −1 · .95 + .1 = −.85
    weights, optimizer = two_weights(weight_decay=0.5, max_grad_norm=None)
    weights.grad = torch.tensor([3.0, -0.004])
    assert optimizer.gradient_norm() == pytest.approx(3.0000027)
    optimizer.step(0.1)
    assert weights.tolist() == pytest.approx([1.8, -0.85], abs=1e-5)


def test_the_second_step_has_the_moments_of_the_first() -> None:
    # β = (.5, .75), gradients 4 then 0: m = .5·2 = 1, m̂ = 1/(1 − .25) = 4/3; v = .75·4 = 3, v̂ = 3/(1 − .5625) = 48/7.
    # Steps: .1 · 4/4 = .1, then .1 · (4/3)/√(48/7) = .0509175. The second weight has no gradient at all.
    weights, optimizer = two_weights(betas=[0.5, 0.75], max_grad_norm=None)
    weights.grad = torch.tensor([4.0, 0.0])
    optimizer.step(0.1)
    assert weights.tolist() == pytest.approx([1.9, -1.0])
    optimizer.clear()
    assert optimizer.gradient_norm() == 0.0
    optimizer.step(0.1)
    assert weights.tolist() == pytest.approx([1.9 - 0.0509175, -1.0], abs=1e-6)


def test_the_reported_norm_is_that_before_clipping() -> None:
    weights, optimizer = two_weights(max_grad_norm=1.0)
    weights.grad = torch.tensor([3.0, 4.0])
    assert optimizer.gradient_norm() == pytest.approx(5.0)
    assert weights.grad.tolist() == pytest.approx([0.6, 0.8], abs=1e-5)
    weights.grad = torch.tensor([0.3, 0.4])
    assert optimizer.gradient_norm() == pytest.approx(0.5)
    assert weights.grad.tolist() == pytest.approx([0.3, 0.4])
