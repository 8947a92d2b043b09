"""Estimators of the divergence from a reference policy, per token (http://joschu.net/blog/kl-approx.html).

As a loss only k2 has the gradient of the reverse KL on policy (k1's is zero in expectation), so the forms with a plus
give the value of one estimator and the gradient of k2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from trainers.losses.policy import LOG_RATIO_LIMIT

if TYPE_CHECKING:
    from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k3+"]
ESTIMATORS: tuple[str, ...] = get_args(KLEstimator)


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate of KL(π_θ‖π_ref) at each token, [N], nats; δ = ℓ − ℓʳ.

    k1 = δ; k2 = δ²/2; k3 = e^−δ − 1 + δ; low_var_kl = k3 of δ clamped to ±20, result clamped to ±10; abs = |δ|;
    k1+ and k3+ have the value of k1 and k3 and the gradient of k2.

    Raises:
        ValueError: `estimator` is none of these.
    """
    delta = logprobs - reference_logprobs
    clamped = delta.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match estimator:
        case "k1":
            return delta
        case "k2":
            return delta.square() / 2
        case "k3":
            return (-clamped).exp() - 1 + delta
        case "low_var_kl":
            return ((-clamped).exp() - 1 + clamped).clamp(-10.0, 10.0)
        case "abs":
            return delta.abs()
        case "k1+" | "k3+":
            square = delta.square() / 2
            value = delta if estimator == "k1+" else (-clamped).exp() - 1 + delta
            return square - square.detach() + value.detach()
    raise ValueError(f"unknown KL estimator {estimator!r}; known: {', '.join(ESTIMATORS)}")
