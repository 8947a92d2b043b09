"""Algorithms whose loss is an aggregate of token losses: the fields that choose it, and the call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from trainers.algorithms.base import AlgorithmConfig, Denominators, LossInputs
from trainers.losses.aggregate import Aggregation, aggregate

if TYPE_CHECKING:
    from torch import Tensor


class AggregatedConfig(AlgorithmConfig):
    """Base of the configuration of such an algorithm."""

    aggregate: Aggregation = Field(
        default="token_mean", description="how token losses become one number: mean over tokens, or over rows"
    )
    loss_norm: float | None = Field(default=None, gt=0, description="tokens that seq_mean_token_sum_norm divides by")

    @model_validator(mode="after")
    def _norm_belongs_to_its_aggregation(self) -> Self:
        if (self.aggregate == "seq_mean_token_sum_norm") != (self.loss_norm is not None):
            raise ValueError(
                f"aggregate is {self.aggregate} and loss_norm is {self.loss_norm}: "
                "seq_mean_token_sum_norm needs loss_norm, the others do not take it"
            )
        return self


def aggregated(config: AggregatedConfig, per_token: Tensor, inputs: LossInputs, denominators: Denominators) -> Tensor:
    """The micro-batch's share of the batch's aggregate of `per_token` [N] times the rows' weights; a scalar."""
    return aggregate(
        per_token * inputs.weights.to(per_token.dtype),
        inputs.loss_mask,
        inputs.row,
        inputs.row_tokens(),
        how=config.aggregate,
        tokens=denominators.tokens,
        rows=denominators.rows,
        norm=config.loss_norm,
    )
