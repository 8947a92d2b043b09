"""Advantages: columnar functions from rewards and groups to one number per row."""

from __future__ import annotations

from trainers.advantages.base import AdvantageResult, compute_advantages

__all__ = ["AdvantageResult", "compute_advantages"]
