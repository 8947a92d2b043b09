"""Forward and backward over a batch's micro-batches: gradients accumulate, sums for the report add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from buffer_engine.errors import NonFiniteLossError
from trainers.algorithms.base import Algorithm, Denominators, LossInputs
from trainers.collate import BatchArrays
from trainers.losses.policy import log_ratio
from trainers.packing import PackedBatch
from trainers.token_stats import TokenRecord
from trainers.torch_forward import ForwardSettings, token_logprobs
from trainers.torch_model import TrainableModel

if TYPE_CHECKING:
    from torch import Tensor

Reference = Callable[[PackedBatch], "Tensor"]


@dataclass(slots=True)
class StepSums:
    """Sums over the computed tokens of a step; filled while the step runs."""

    loss: float = 0.0
    tokens: int = 0
    sampled_tokens: int = 0
    ratio: float = 0.0
    kl: float = 0.0
    on_policy_tokens: int = 0
    deviation: float = 0.0
    entropy: float | None = None
    algorithm: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Means over the tokens each is defined on; a mean over no token is left out."""
        metrics = {"loss": self.loss}
        if self.sampled_tokens:
            metrics["ratio_mean"] = self.ratio / self.sampled_tokens
            metrics["approx_kl"] = self.kl / self.sampled_tokens
        if self.on_policy_tokens:
            metrics["ratio_deviation"] = self.deviation / self.on_policy_tokens
        if self.tokens:
            metrics.update({name: total / self.tokens for name, total in self.algorithm.items()})
            if self.entropy is not None:
                metrics["entropy"] = self.entropy / self.tokens
        return metrics


def accumulate(
    model: TrainableModel,
    algorithm: Algorithm[Any],
    arrays: BatchArrays,
    batches: Sequence[PackedBatch],
    denominators: Denominators,
    settings: ForwardSettings,
    *,
    model_version: int,
    recompute_old_logprobs: bool,
    reference: Reference | None,
    batch_id: str,
    record: TokenRecord | None = None,
) -> StepSums:
    """Add the gradient of the batch's loss to the parameters, one micro-batch at a time.

    Args:
        record: takes the values of every token; None: only sums are kept.

    Raises:
        NonFiniteLossError: the loss of a micro-batch is not finite; names the batch and its rows.
    """
    sums = StepSums()
    for batch in batches:
        logprobs, entropy = token_logprobs(model, batch, settings)
        inputs = _inputs(arrays, batch, logprobs, algorithm, recompute_old_logprobs, reference)
        output = algorithm.loss(inputs, denominators)
        loss = float(output.loss.detach())
        if not np.isfinite(loss):
            names = ", ".join(arrays.name(int(row)) for row in batch.rows[:4])
            raise NonFiniteLossError(
                f"batch {batch_id}: the loss is {loss} in the micro-batch of {len(batch.rows)} rows that begins with "
                f"{names}; weights are unchanged. Look at these rows' log-probs and advantages, or lower learning_rate."
            )
        output.loss.backward()
        sums.loss += loss
        sums.tokens += len(batch.trained)
        for name, total in output.sums.items():
            sums.algorithm[name] = sums.algorithm.get(name, 0.0) + float(total)
        if entropy is not None:
            sums.entropy = (sums.entropy or 0.0) + float(entropy.sum())
        if record is not None:
            record.note(batch, logprobs.detach(), entropy)
        if algorithm.needs.logprobs:
            _compare_with_sampler(sums, arrays, batch, logprobs.detach(), model_version)
    return sums


def _inputs(
    arrays: BatchArrays,
    batch: PackedBatch,
    logprobs: Tensor,
    algorithm: Algorithm[Any],
    recompute_old_logprobs: bool,
    reference: Reference | None,
) -> LossInputs:
    import torch

    device = logprobs.device

    def tensor(values: Any) -> Tensor:
        return torch.from_numpy(values).to(device)

    needs = algorithm.needs
    behaviour = tensor(arrays.logprobs[batch.source]) if needs.logprobs else None
    return LossInputs(
        logprobs=logprobs,
        loss_mask=torch.ones(len(batch.trained), dtype=torch.bool, device=device),
        row=tensor(batch.trained_rows),
        row_count=len(batch.rows),
        weights=tensor(arrays.weights[batch.rows][batch.trained_rows]),
        # One update per batch: the policy before the step is the policy of this forward pass.
        old_logprobs=logprobs.detach() if recompute_old_logprobs else behaviour,
        advantages=tensor(arrays.advantages[batch.source]) if needs.advantages else None,
        behaviour_logprobs=behaviour,
        reference_logprobs=reference(batch) if reference is not None else None,
    )


def _compare_with_sampler(
    sums: StepSums, arrays: BatchArrays, batch: PackedBatch, logprobs: Tensor, model_version: int
) -> None:
    """Add ratio, k3 divergence and on-policy deviation against the sampler's stored log-probs."""
    import torch

    behaviour = torch.from_numpy(arrays.logprobs[batch.source]).to(logprobs.device)
    difference = log_ratio(logprobs, behaviour).double()
    ratio = difference.exp()
    current = torch.from_numpy(arrays.model_versions[batch.rows][batch.trained_rows] == model_version)
    current = current.to(logprobs.device)
    sums.sampled_tokens += len(ratio)
    sums.ratio += float(ratio.sum())
    sums.kl += float((ratio - 1.0 - difference).sum())
    sums.on_policy_tokens += int(current.sum())
    sums.deviation += float(((ratio - 1.0).abs() * current).sum())
