"""Leave-one-out advantage: reward minus the mean of the other valid rows of its group (RLOO, arXiv 2402.14740)."""

from __future__ import annotations

from typing import ClassVar, Literal

import polars as pl

from trainers.advantages.base import Advantage, AdvantageConfig, AdvantageResult, group_statistics, grouped_result


class RlooAdvantageConfig(AdvantageConfig):
    """(G·R − ΣR) / (G − 1), G the number of valid rows of the group."""

    type: Literal["rloo"] = "rloo"


class RlooAdvantage(Advantage[RlooAdvantageConfig]):
    """Reward against the mean of its siblings."""

    Config = RlooAdvantageConfig
    needs_reward: ClassVar[bool] = True
    needs_groups: ClassVar[bool] = True

    def compute(self, frame: pl.DataFrame) -> AdvantageResult:
        """See `Advantage.compute`."""
        frame = group_statistics(frame)
        size = pl.col("baseline_n").cast(pl.Float64)
        return grouped_result(frame, (size * pl.col("reward") - pl.col("total")) / (size - 1.0))
