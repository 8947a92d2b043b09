"""Choosing one token per row from logits, with the log-probability of the distribution that was really used.

Inverse-CDF sampling from one uniform number per row and token: a row's tokens depend on its own logits and its own
seed, never on its neighbours in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from buffer_engine.extras import require
from explorers.base import Sampling

if TYPE_CHECKING:
    import torch


def logprob_kind(sampling: Sampling) -> Literal["raw", "temperature", "truncated"]:
    """Which distribution the log-probs of tokens drawn with `sampling` describe; greedy ones are the raw model's."""
    if sampling.temperature == 0:
        return "raw"
    if sampling.top_p < 1 or sampling.top_k > 0:
        return "truncated"
    return "raw" if sampling.temperature == 1 else "temperature"


def uniforms(seed: int, count: int) -> list[float]:
    """`count` numbers in [0, 1) from a counter-based generator: the n-th depends on the seed and n alone."""
    return [float(value) for value in np.random.Generator(np.random.Philox(key=seed)).random(count)]


def choose_tokens(
    logits_B_V: torch.Tensor, samplings: Sequence[Sampling], uniforms_B: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Token and log-probability (nats) per row.

    Args:
        logits_B_V: finite logits, any floating dtype; worked on in fp32 and summed in fp64.
        samplings: how each row draws; temperature 0 takes the largest logit (the lowest id where several tie).
        uniforms_B: one number in [0, 1) per row; greedy rows ignore it.
    """
    torch = require("torch", "torch")
    logits = logits_B_V.float()
    warm = torch.tensor([s.temperature or 1.0 for s in samplings], dtype=torch.float32, device=logits.device)
    logprobs = torch.log_softmax(logits / warm[:, None], dim=-1)
    for row, sampling in enumerate(samplings):
        if logprob_kind(sampling) == "truncated":
            logprobs[row] = _truncate(logprobs[row], sampling)
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    drawn = torch.tensor(uniforms_B, dtype=torch.float64, device=logits.device)
    # Scaling by the row's own total absorbs the rounding of the sum; `right` steps over tokens of probability 0.
    target = (drawn * cumulative[:, -1]).clamp(max=torch.nextafter(cumulative[:, -1], cumulative.new_zeros(())))
    tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    greedy = torch.tensor([s.temperature == 0 for s in samplings], device=logits.device)
    tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), chosen.tolist()


def _truncate(logprobs_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probs renormalised over the top-k tokens and then the smallest set that holds `top_p` of what is left."""
    torch = require("torch", "torch")
    ordered, order = torch.sort(logprobs_V, descending=True, stable=True)
    if sampling.top_k > 0:
        ordered[sampling.top_k :] = -torch.inf
    if sampling.top_p < 1:
        share = ordered.double().softmax(dim=-1)
        before = share.cumsum(dim=-1) - share
        ordered[before >= sampling.top_p] = -torch.inf
    return torch.empty_like(ordered).scatter_(0, order, ordered.log_softmax(dim=-1))
