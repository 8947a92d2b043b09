"""An algorithm on plain numbers: what a person compares with a calculation by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from buffer_engine.errors import SchemaError
from buffer_engine.extras import require
from trainers.algorithms.base import Algorithm, AlgorithmConfig, LossInputs
from trainers.registry import ALGORITHMS

if TYPE_CHECKING:
    from torch import Tensor

Ragged = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class LossFixture:
    """Rows of numbers, one list per row, one number per token; log-probs in nats.

    Attributes:
        loss_mask: null: every token is trained.
        weights: one per row; null: all 1.
    """

    logprobs: Ragged
    old_logprobs: Ragged | None = None
    advantages: Ragged | None = None
    reference_logprobs: Ragged | None = None
    behaviour_logprobs: Ragged | None = None
    loss_mask: Sequence[Sequence[int | bool]] | None = None
    weights: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class LossEvaluation:
    """The loss of a fixture, of each of its tokens (0 where masked), its gradient by ℓ, and means of metrics."""

    loss: float
    per_token: list[list[float]]
    gradient: list[list[float]]
    metrics: Mapping[str, float] = field(default_factory=dict)


def evaluate_loss(config: AlgorithmConfig, fixture: LossFixture) -> LossEvaluation:
    """Loss of `fixture` as one batch under `config`, in float64.

    Raises:
        SchemaError: lists of different shapes, or no trained token.
        ValueError: the fixture lacks what the algorithm needs.
    """
    torch = require("torch", "torch")
    lengths = [len(line) for line in fixture.logprobs]

    def flat(name: str, values: Ragged | None) -> Tensor | None:
        if values is None:
            return None
        if [len(line) for line in values] != lengths:
            raise SchemaError(f"{name} has rows of {[len(line) for line in values]} tokens, logprobs of {lengths}")
        return torch.tensor([value for line in values for value in line], dtype=torch.float64)

    logprobs = flat("logprobs", fixture.logprobs)
    assert logprobs is not None
    logprobs.requires_grad_()
    mask = flat("loss_mask", fixture.loss_mask)
    mask = torch.ones(len(logprobs), dtype=torch.bool) if mask is None else mask.bool()
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    weights = [1.0] * len(lengths) if fixture.weights is None else list(fixture.weights)
    if len(weights) != len(lengths):
        raise SchemaError(f"weights has {len(weights)} values for {len(lengths)} rows")
    inputs = LossInputs(
        logprobs=logprobs,
        loss_mask=mask,
        row=row,
        row_count=len(lengths),
        weights=torch.tensor(weights, dtype=torch.float64)[row],
        old_logprobs=flat("old_logprobs", fixture.old_logprobs),
        advantages=flat("advantages", fixture.advantages),
        behaviour_logprobs=flat("behaviour_logprobs", fixture.behaviour_logprobs),
        reference_logprobs=flat("reference_logprobs", fixture.reference_logprobs),
    )
    algorithm: Algorithm[AlgorithmConfig] = ALGORITHMS.load(config.type)(config)
    denominators = algorithm.denominators(inputs.row_tokens().numpy())
    if denominators.tokens == 0:
        raise SchemaError("no token of the fixture is trained: loss_mask is false everywhere")
    output = algorithm.loss(inputs, denominators)
    output.loss.backward()
    gradient = logprobs.grad if logprobs.grad is not None else torch.zeros_like(logprobs)
    bounds = list(pairwise(np.concatenate([[0], np.cumsum(lengths)]).tolist()))
    return LossEvaluation(
        loss=float(output.loss.detach()),
        per_token=[output.per_token[start:end].tolist() for start, end in bounds],
        gradient=[gradient[start:end].tolist() for start, end in bounds],
        metrics={name: float(total) / denominators.tokens for name, total in output.sums.items()},
    )
