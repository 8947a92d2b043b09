"""SFT: negative log-likelihood of the unmasked tokens, whoever wrote them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from trainers.algorithms.base import Algorithm, AlgorithmConfig, Denominators, LossInputs, LossOutput, Needs
from trainers.losses.aggregate import Aggregation, aggregate


class SFTConfig(AlgorithmConfig):
    """Supervised fine-tuning."""

    type: Literal["sft"] = "sft"
    aggregate: Aggregation = "token_mean"
    loss_norm: float | None = Field(default=None, gt=0, description="tokens that seq_mean_token_sum_norm divides by")

    @property
    def advantage(self) -> None:
        """None: the algorithm uses no advantages."""
        return None

    @model_validator(mode="after")
    def _norm_belongs_to_its_aggregation(self) -> Self:
        if (self.aggregate == "seq_mean_token_sum_norm") != (self.loss_norm is not None):
            raise ValueError(
                f"aggregate is {self.aggregate} and loss_norm is {self.loss_norm}: "
                "seq_mean_token_sum_norm needs loss_norm, the others do not take it"
            )
        return self


class SFT(Algorithm[SFTConfig]):
    """−ℓ on every unmasked token; needs neither rewards nor behaviour log-probs."""

    Config = SFTConfig

    @property
    def needs(self) -> Needs:
        """Token ids and a mask only."""
        return Needs()

    @property
    def skips_zero_advantage(self) -> bool:
        """False: advantages play no part."""
        return False

    def loss(self, inputs: LossInputs, denominators: Denominators) -> LossOutput:
        """See `Algorithm.loss`."""
        import torch

        per_token = torch.where(inputs.loss_mask, -inputs.logprobs, torch.zeros_like(inputs.logprobs))
        loss = aggregate(
            per_token * inputs.weights.to(per_token.dtype),
            inputs.loss_mask,
            inputs.row,
            inputs.row_tokens(),
            how=self.config.aggregate,
            tokens=denominators.tokens,
            rows=denominators.rows,
            norm=self.config.loss_norm,
        )
        return LossOutput(loss, per_token.detach())
