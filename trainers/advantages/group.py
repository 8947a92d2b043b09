"""Group advantage: reward minus the mean of its group, scaled (GRPO, arXiv 2402.03300; unscaled: 2503.20783)."""

from __future__ import annotations

from typing import ClassVar, Literal

import polars as pl
from pydantic import Field

from trainers.advantages.base import Advantage, AdvantageConfig, AdvantageResult, group_statistics, grouped_result


class GroupAdvantageConfig(AdvantageConfig):
    """(R − mean) / (s + epsilon) with s the sample standard deviation (n − 1)."""

    type: Literal["group"] = "group"
    scale: Literal["std", "batch", "none"] = Field(
        default="std", description="divide by the deviation of the group, of the whole batch's rewards, or not at all"
    )
    epsilon: float = Field(default=1e-6, ge=0, description="added to the deviation")


class GroupAdvantage(Advantage[GroupAdvantageConfig]):
    """Reward against the group's mean; 0 where the group says nothing (one valid row, or all equal)."""

    Config = GroupAdvantageConfig
    needs_reward: ClassVar[bool] = True
    needs_groups: ClassVar[bool] = True

    def compute(self, frame: pl.DataFrame) -> AdvantageResult:
        """See `Advantage.compute`."""
        frame = group_statistics(frame)
        centred = pl.col("reward") - pl.col("mean")
        if self.config.scale == "none":
            return grouped_result(frame, centred)
        spread = pl.col("spread") if self.config.scale == "std" else pl.col("counted").std(ddof=1)
        return grouped_result(frame, centred / (spread + self.config.epsilon))
