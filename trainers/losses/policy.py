"""Policy-gradient losses per token, before aggregation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this before exp, in every loss: e^20 is finite in every precision we train in."""


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """ℓ − ℓ°, clamped to ±20; shape [N], nats."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ppo_clip(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate (PPO, arXiv 1707.06347) with separate bounds (DAPO, 2503.14476) and dual clip (1912.09729).

    u = max(−A r, −A clip(r, 1 − clip_low, 1 + clip_high)); where A < 0, min(u, −A·dual_clip).

    Args:
        ratio: π_θ/π_old of each token, [N].
        advantages: [N].
        dual_clip: bound on the ratio's weight for negative advantages, above 1; None: off.

    Returns:
        The loss [N], and a bool [N] that is true where a bound was active (those tokens have no gradient).
    """
    import torch

    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, bounded)
    active = bounded > plain
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        dual = (advantages < 0) & (loss > ceiling)
        loss = torch.where(dual, ceiling, loss)
        active = active | dual
    return loss, active


def importance_weights(log_weights: Tensor, *, treatment: str, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Correction for a sampler that is not the policy the ratio is taken against: detached weights, [N].

    Args:
        log_weights: log(π_old/μ) of each token (or of its sequence), [N], clamped here to ±20.
        treatment: `truncate` caps the weight at `high` (TIS); `mask` zeroes weights outside [low, high] (IcePop).

    Returns:
        The weights [N], and a bool [N] that is true where one was capped or zeroed.
    """
    import torch

    weights = log_weights.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if treatment == "truncate":
        return weights.clamp(max=high), weights > high
    inside = (weights >= low) & (weights <= high)
    return torch.where(inside, weights, torch.zeros_like(weights)), ~inside
