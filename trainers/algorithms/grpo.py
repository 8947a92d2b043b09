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
from trainers.algorithms.aggregated import AggregatedConfig, aggregated
from trainers.algorithms.base import Algorithm, Denominators, LossInputs, LossOutput, Needs, required
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
    coefficient: float = Field(default=0.001, gt=0, description="weight of the estimate")
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
    low: float = Field(default=0.5, ge=0, description="least weight that `mask` keeps; `truncate` does not use it")
    high: float = Field(default=2.0, gt=0, description="largest weight: the cap, or the most that `mask` keeps")

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        if self.treatment == "mask" and self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high}): every token would be masked")
        return self


class GRPOConfig(AggregatedConfig):
    """Clipped policy gradient on group advantages."""

    type: Literal["grpo"] = "grpo"
    clip: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]] = Field(
        default=(0.2, 0.2), description="[low, high]: the ratio is held in [1 − low, 1 + high]"
    )
    dual_clip: float | None = Field(default=3.0, gt=1, description="bound for negative advantages; null: off")
    advantage: Annotated[SerializeAsAny[AdvantageConfig], component(ADVANTAGES)] = Field(
        default=GroupAdvantageConfig(), description="how rewards become advantages: group, rloo or constant"
    )
    kl: KLConfig | None = Field(default=None, description="pull towards the start weights; null: none")
    off_policy: OffPolicyConfig | None = Field(
        default=None, description="correct for a sampler that is not the trained policy; null: do not"
    )

    @model_validator(mode="after")
    def _a_penalty_in_the_reward_reaches_the_advantage(self) -> Self:
        if self.kl is None or self.kl.place != "reward" or ADVANTAGES.load(self.advantage.type).needs_reward:
            return self
        raise ValueError(
            f"kl has place: reward, and advantage {self.advantage.type} does not look at rewards, so the penalty would "
            "do nothing: write place: loss, or another advantage"
        )


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
        """See `Algorithm.loss`. Sums: clip_fraction; kl with a KL term in the loss; off_policy_fraction."""
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
            log_weights = self._log_weights(config.off_policy, old - behaviour, inputs)
            weights, treated = importance_weights(
                log_weights,
                treatment=config.off_policy.treatment,
                low=config.off_policy.low,
                high=config.off_policy.high,
            )
            per_token = per_token * weights
            sums["off_policy_fraction"] = (treated & mask).sum()
        if config.kl is not None and config.kl.place == "loss":
            reference = torch.where(mask, required(inputs.reference_logprobs, "reference log-probs", "grpo"), zero)
            divergence = kl_estimate(logprobs, reference, config.kl.estimator)
            per_token = per_token + config.kl.coefficient * divergence
            sums["kl"] = torch.where(mask, divergence, zero).sum().detach()

        loss = aggregated(config, per_token, inputs, denominators)
        return LossOutput(loss, torch.where(mask, per_token, zero).detach(), sums)

    @staticmethod
    def _log_weights(config: OffPolicyConfig, log_weights: Tensor, inputs: LossInputs) -> Tensor:
        """log(π_old/μ) at the configured level, [N]; 0 stands at masked tokens of `log_weights`."""
        import torch

        if config.level == "token":
            return log_weights
        row_sums = torch.zeros(inputs.row_count, dtype=log_weights.dtype, device=log_weights.device)
        row_sums = row_sums.index_add_(0, inputs.row, log_weights.detach())
        if config.level == "geometric":
            row_sums = row_sums / inputs.row_tokens().clamp(min=1)
        return row_sums[inputs.row]
