"""Constant advantage: every row without an error counts the same, whatever its reward (rejection sampling)."""

from __future__ import annotations

from typing import ClassVar, Literal

import polars as pl
from pydantic import Field

from trainers.advantages.base import Advantage, AdvantageConfig, AdvantageResult


class ConstantAdvantageConfig(AdvantageConfig):
    """The same advantage for every row."""

    type: Literal["constant"] = "constant"
    value: float = Field(default=1.0, description="advantage of every row without an error")


class ConstantAdvantage(Advantage[ConstantAdvantageConfig]):
    """Needs neither rewards nor groups."""

    Config = ConstantAdvantageConfig
    needs_reward: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = False

    def compute(self, frame: pl.DataFrame) -> AdvantageResult:
        """See `Advantage.compute`."""
        values = frame.select(
            advantage=pl.when(pl.col("error").is_null()).then(pl.lit(self.config.value)).cast(pl.Float64)
        )["advantage"]
        return AdvantageResult(values, {"unscored": values.null_count(), "singleton": 0, "zero_variance": 0})
