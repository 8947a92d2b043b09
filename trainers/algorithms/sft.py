"""SFT: negative log-likelihood of the unmasked tokens, whoever wrote them."""

from __future__ import annotations

from typing import Literal

from trainers.algorithms.aggregated import AggregatedConfig, aggregated
from trainers.algorithms.base import Algorithm, Denominators, LossInputs, LossOutput, Needs


class SFTConfig(AggregatedConfig):
    """Supervised fine-tuning."""

    type: Literal["sft"] = "sft"

    @property
    def advantage(self) -> None:
        """None: the algorithm uses no advantages."""
        return None


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
        return LossOutput(aggregated(self.config, per_token, inputs, denominators), per_token.detach())
