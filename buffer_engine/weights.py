"""Weights on their way from the trainer to the explorer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """One published version.

    Attributes:
        version: 0 is the start; one more per optimizer step.
        directory: Hugging Face folder with the weights; None when they only travel in memory.
        tensors: name → tensor (torch), shared not copied; None when they only travel by folder.
    """

    version: int
    directory: Path | None = None
    tensors: Mapping[str, Any] | None = None


class WeightChannel(Protocol):
    """Carries the newest weights; a reader that is late sees only the newest."""

    def publish(self, weights: WeightVersion) -> None:
        """Make `weights` the newest version; versions must rise."""
        ...

    def latest(self) -> WeightVersion | None:
        """The newest version, None before the first."""
        ...


class MemoryWeightChannel:
    """A channel inside one process: hands over references, copies nothing."""

    def __init__(self) -> None:
        self._latest: WeightVersion | None = None

    def publish(self, weights: WeightVersion) -> None:
        """Make `weights` the newest version.

        Raises:
            ValueError: its version is lower than the newest one.
        """
        if self._latest is not None and weights.version < self._latest.version:
            raise ValueError(f"version {weights.version} is older than the published {self._latest.version}")
        self._latest = weights

    def latest(self) -> WeightVersion | None:
        """The newest version, None before the first."""
        return self._latest
