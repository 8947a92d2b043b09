"""The trainer plug-in surface: five calls, and the batch they work on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from buffer_engine.weights import WeightVersion

BATCH_SCHEMA = pa.schema(
    [
        pa.field("experience_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("advantages", pa.list_(pa.float64())),
        pa.field("reward", pa.float64()),
        pa.field("weight", pa.float64(), nullable=False),
        pa.field("model_version", pa.int64()),
    ]
)
"""Rows of a training batch. `advantages` has one value per token (0 where masked), null when the algorithm uses none;
`logprobs` is null for rows that no model sampled; `kind` is rollout | expert."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One optimizer step's rows (`BATCH_SCHEMA`), the step they make, and the weight version before it."""

    batch_id: str
    step: int
    model_version: int
    rows: pa.Table


@dataclass(frozen=True, slots=True)
class StepReport:
    """Numbers of one step: at least loss, grad_norm, learning_rate, trained_tokens, seconds; all finite.

    Attributes:
        token_stats: what the step saw at every token (`trainers.token_stats.TOKEN_STATS_SCHEMA`); None: not recorded.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    token_stats: pa.Table | None = None


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Per-token log-probabilities in nats, ragged, aligned with the batch's rows; the first token of a row is null."""

    values: pa.ListArray


class Trainer(Protocol):
    """Owns weights and optimizer; everything else (rows, advantages, manifests) is handed to it."""

    def train_step(self, batch: TrainBatch) -> StepReport:
        """One optimizer step.

        Raises:
            NonFiniteLossError: loss or gradient is not finite; weights and optimizer are unchanged.
            RowTooLongError: a row does not fit the token budget.
            TrainingError: the first on-policy step's mean |ratio − 1| is above the tolerance.
        """
        ...

    def save_weights(self, directory: Path) -> None:
        """Write a Hugging Face folder, complete or not at all."""
        ...

    def save_checkpoint(self, directory: Path) -> None:
        """Write weights, optimizer and generator state, complete or not at all."""
        ...

    def load_checkpoint(self, directory: Path) -> None:
        """Continue from `save_checkpoint`, bit for bit."""
        ...

    def log_probs(self, batch: TrainBatch) -> LogProbs:
        """Log-probabilities of the batch's tokens under the current weights, without gradient."""
        ...

    def weights(self, version: int) -> WeightVersion:
        """The current weights as a version to publish (tensors shared, not copied)."""
        ...
