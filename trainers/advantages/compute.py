"""The one function that turns rewards into advantages."""

from __future__ import annotations

from trainers.advantages.base import AdvantageResult, compute_advantages

__all__ = ["AdvantageResult", "compute_advantages"]
