"""GRPO: the clipped policy loss on advantages given per row, with any aggregation and an optional KL term.

With the right settings it is also Dr.GRPO (scale none, seq_mean_token_sum_norm), DAPO's loss (clip [0.2, 0.28],
token_mean) and RLOO (advantage rloo). Sources: arXiv 2402.03300, 2503.20783, 2503.14476, 2402.14740.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from buffer_engine.config import ComponentConfig, SerializeAsAny, component
from trainers.advantages.base import AdvantageConfig
from trainers.advantages.group import GroupAdvantageConfig
from trainers.algorithms.base import Algorithm, AlgorithmConfig, Denominators, LossInputs, LossOutput, Needs, required
from trainers.losses.aggregate import Aggregation, aggregate
from trainers.losses.kl import KLEstimator, kl_estimate
from trainers.losses.policy import importance_weights, log_ratio, ppo_clip
from trainers.registry import ADVANTAGES

if TYPE_CHECKING:
    from torch import Tensor


class KLConfig(ComponentConfig):
    """A pull towards the weights that training started from."""

    estimator: KLEstimator = Field(
        default="k3", description="which estimate; in the reward use k1, as a loss k2, k1+ or k3+"
    )
    coefficient: float = Field(default=0.001, gt=0)
    place: Literal["loss", "reward"] = Field(
        default="loss", description="a loss term, or taken off the reward of each row"
    )


class OffPolicyConfig(ComponentConfig):
    """Correction where the sampler's log-probs are not the trainer's own (needs `recompute_old_logprobs`)."""

    level: Literal["token", "sequence", "geometric"] = Field(
        default="token", description="weight of each token, product over the row, or geometric mean over the row"
    )
    treatment: Literal["truncate", "mask"] = Field(
        default="truncate", description="cap at `high`, or 0 outside [low, high]"
    )
    low: float = Field(default=0.5, ge=0)
    high: float = Field(default=2.0, gt=0)


class GRPOConfig(AlgorithmConfig):
    """Clipped policy gradient on group advantages."""

    type: Literal["grpo"] = "grpo"
    clip: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]] = Field(
        default=(0.2, 0.2), description="[low, high]: the ratio is held in [1 − low, 1 + high]"
    )
    dual_clip: float | None = Field(default=3.0, gt=1, description="bound for negative advantages; null: off")
    aggregate: Aggregation = "token_mean"
    loss_norm: float | None = Field(default=None, gt=0, description="tokens that seq_mean_token_sum_norm divides by")
    advantage: Annotated[SerializeAsAny[AdvantageConfig], component(ADVANTAGES)] = GroupAdvantageConfig()
    kl: KLConfig | None = None
    off_policy: OffPolicyConfig | None = None

    @model_validator(mode="after")
    def _norm_belongs_to_its_aggregation(self) -> Self:
        if (self.aggregate == "seq_mean_token_sum_norm") != (self.loss_norm is not None):
            raise ValueError(
                f"aggregate is {self.aggregate} and loss_norm is {self.loss_norm}: "
                "seq_mean_token_sum_norm needs loss_norm, the others do not take it"
            )
        return self


class GRPO(Algorithm[GRPOConfig]):
    """Clipped policy loss; see the module."""

    Config = GRPOConfig

    @property
    def needs(self) -> Needs:
        """Rewards and groups only as far as the advantage uses them."""
        advantage: Any = ADVANTAGES.load(self.config.advantage.type)
        kl = self.config.kl
        return Needs(
            reward=advantage.needs_reward,
            logprobs=True,
            groups=advantage.needs_groups,
            reference=kl is not None,
            advantages=True,
            reward_penalty=kl is not None and kl.place == "reward",
        )

    @property
    def skips_zero_advantage(self) -> bool:
        """True unless a KL term in the loss pulls on every row."""
        return self.config.kl is None or self.config.kl.place == "reward"

    def loss(self, inputs: LossInputs, denominators: Denominators) -> LossOutput:
        """See `Algorithm.loss`. Sums: clip_fraction, and kl with a KL term in the loss."""
        import torch

        config = self.config
        mask = inputs.loss_mask
        zero = torch.zeros_like(inputs.logprobs)
        # Masked positions are filled before any arithmetic: what stands there may be NaN, and NaN·0 is NaN.
        logprobs = torch.where(mask, inputs.logprobs, zero)
        old = torch.where(mask, required(inputs.old_logprobs, "behaviour log-probs", "grpo"), zero)
        advantages = torch.where(mask, required(inputs.advantages, "advantages", "grpo").to(logprobs.dtype), zero)

        ratio = log_ratio(logprobs, old).exp()
        per_token, active = ppo_clip(
            ratio, advantages, clip_low=config.clip[0], clip_high=config.clip[1], dual_clip=config.dual_clip
        )
        sums = {"clip_fraction": (active & mask).sum().detach()}
        if config.off_policy is not None:
            behaviour = torch.where(mask, required(inputs.behaviour_logprobs, "behaviour log-probs", "grpo"), zero)
            per_token = per_token * self._correction(config.off_policy, old - behaviour, inputs)
        if config.kl is not None and config.kl.place == "loss":
            reference = torch.where(mask, required(inputs.reference_logprobs, "reference log-probs", "grpo"), zero)
            divergence = kl_estimate(logprobs, reference, config.kl.estimator)
            per_token = per_token + config.kl.coefficient * divergence
            sums["kl"] = torch.where(mask, divergence, zero).sum().detach()

        loss = aggregate(
            per_token * inputs.weights.to(per_token.dtype),
            mask,
            inputs.row,
            inputs.row_tokens(),
            how=config.aggregate,
            tokens=denominators.tokens,
            rows=denominators.rows,
            norm=config.loss_norm,
        )
        return LossOutput(loss, torch.where(mask, per_token, zero).detach(), sums)

    @staticmethod
    def _correction(config: OffPolicyConfig, log_weights: Tensor, inputs: LossInputs) -> Tensor:
        """Detached weights π_old/μ, [N], of tokens or of whole rows (0 stands at masked tokens of `log_weights`)."""
        import torch

        if config.level != "token":
            row_sums = torch.zeros(inputs.row_count, dtype=log_weights.dtype, device=log_weights.device)
            row_sums = row_sums.index_add_(0, inputs.row, log_weights.detach())
            if config.level == "geometric":
                row_sums = row_sums / inputs.row_tokens().clamp(min=1)
            log_weights = row_sums[inputs.row]
        return importance_weights(log_weights, treatment=config.treatment, low=config.low, high=config.high)
