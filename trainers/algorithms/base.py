"""What an algorithm is: what it needs of the rows, its denominators over the batch, and its loss over a micro-batch.

An algorithm holds no state and no model. Configuration classes live beside it, so this package imports no torch until
a loss is computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from buffer_engine.config import ComponentConfig
from trainers.registry import ALGORITHMS

if TYPE_CHECKING:
    from torch import Tensor


class AlgorithmConfig(ComponentConfig):
    """Base of the configuration of an algorithm; `type` names it."""

    type: Any  # a Literal in every subclass

    @property
    def needs(self) -> Needs:
        """What rows must carry for this algorithm; imports no torch."""
        algorithm: Algorithm[AlgorithmConfig] = ALGORITHMS.load(self.type)(self)
        return algorithm.needs

    @property
    def needs_reward(self) -> bool:
        """Whether rows need a reward."""
        return self.needs.reward

    @property
    def needs_logprobs(self) -> bool:
        """Whether trained tokens need the sampler's log-probs."""
        return self.needs.logprobs

    @property
    def needs_groups(self) -> bool:
        """Whether groups must be whole in a batch."""
        return self.needs.groups

    @property
    def needs_reference(self) -> bool:
        """Whether the start weights are kept beside the trained ones."""
        return self.needs.reference


@dataclass(frozen=True, slots=True)
class Needs:
    """What rows must carry, so that a plan can be checked before anything runs.

    Attributes:
        reward: a reward per row (a score operator, or scores from elsewhere).
        logprobs: behaviour log-probs of every trained token (rows that a model sampled).
        groups: whole groups in a batch.
        reference: log-probs of the start weights; the trainer computes them.
        advantages: a value per token in the batch's `advantages`.
        reward_penalty: the trainer's KL penalty must be taken off the rewards before advantages are computed.
    """

    reward: bool = False
    logprobs: bool = False
    groups: bool = False
    reference: bool = False
    advantages: bool = False
    reward_penalty: bool = False


@dataclass(frozen=True, slots=True)
class Denominators:
    """Sizes of the whole batch, all micro-batches together: unmasked tokens, and rows with at least one."""

    tokens: int
    rows: int


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Tokens of one micro-batch: N tokens of R whole rows, flat.

    Attributes:
        logprobs: ℓ, under the weights being trained, with gradient, [N], nats.
        loss_mask: bool [N]; false tokens contribute nothing, whatever stands in the other tensors.
        row: row of each token, int64 [N], 0 … R − 1.
        row_count: R.
        weights: weight of each token's row, [N].
        old_logprobs: ℓ°, what the ratio is taken against, [N]; None for algorithms that need none.
        advantages: [N]; None for algorithms that need none.
        behaviour_logprobs: log-probs of the sampler, [N]; None: the same as `old_logprobs`.
        reference_logprobs: ℓʳ, [N]; None without a reference.
    """

    logprobs: Tensor
    loss_mask: Tensor
    row: Tensor
    row_count: int
    weights: Tensor
    old_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    behaviour_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None

    def row_tokens(self) -> Tensor:
        """Unmasked tokens of each row, int64 [R]."""
        import torch

        counts = torch.zeros(self.row_count, dtype=torch.int64, device=self.row.device)
        return counts.index_add_(0, self.row, self.loss_mask.to(torch.int64))


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Loss of one micro-batch.

    Attributes:
        loss: its share of the batch's loss, a scalar with gradient; the shares add up to the loss.
        per_token: loss of each token before weights and aggregation, detached, [N]; 0 where masked.
        sums: metric name → sum over the micro-batch's unmasked tokens, detached; divide by their number.
    """

    loss: Tensor
    per_token: Tensor
    sums: Mapping[str, Tensor] = field(default_factory=dict)


ConfigT = TypeVar("ConfigT", bound=AlgorithmConfig)


class Algorithm(ABC, Generic[ConfigT]):
    """One training objective."""

    Config: ClassVar[type[AlgorithmConfig]]

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """What the configured algorithm needs of its rows."""

    @property
    @abstractmethod
    def skips_zero_advantage(self) -> bool:
        """Whether a row whose advantages are all 0 has neither loss nor gradient, so that it need not be computed."""

    @abstractmethod
    def loss(self, inputs: LossInputs, denominators: Denominators) -> LossOutput:
        """Loss of one micro-batch, as its share of the batch.

        Raises:
            ValueError: `inputs` lacks a tensor that `needs` names.
        """

    def denominators(self, row_tokens: npt.NDArray[np.int64]) -> Denominators:
        """Denominators of a batch whose rows have `row_tokens` unmasked tokens, [rows of the whole batch]."""
        return Denominators(tokens=int(row_tokens.sum()), rows=int(np.count_nonzero(row_tokens)))


def required(tensor: Tensor | None, name: str, algorithm: str) -> Tensor:
    """`tensor`, or a ValueError that says which input of which algorithm is missing."""
    if tensor is None:
        raise ValueError(f"{algorithm} needs {name} of every trained token; the batch has none")
    return tensor
