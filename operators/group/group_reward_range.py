"""group_reward_range: groups whose rewards together are out of range."""

from __future__ import annotations

from typing import Literal

import polars as pl
from pydantic import Field, model_validator

from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.verdicts import verdicts_of


class GroupRewardRangeConfig(OperatorConfig):
    """The number of a group and its inclusive limits."""

    column: str = Field("reward", description="numeric column: a measured component rather than a shaped reward")
    statistic: Literal["mean", "min", "max", "median", "range"] = Field(
        "mean", description="what is held against the limits; range: greatest minus least"
    )
    min: float | None = Field(None, description="least value that stays")
    max: float | None = Field(None, description="greatest value that stays")
    over: Literal["survivors", "all"] = Field(
        "survivors", description="which members count: those still there, or also those that operators before took out"
    )

    @model_validator(mode="after")
    def _limits_make_sense(self) -> GroupRewardRangeConfig:
        if self.min is None and self.max is None:
            raise ValueError("give min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is greater than max {self.max}: no group could stay")
        return self


class GroupRewardRange(Operator[GroupRewardRangeConfig]):
    """Rejects whole groups whose statistic is below `min` (`too_low`) or above `max` (`too_high`); limits stay in.

    `statistic: mean` of a 0/1 component is the group's pass rate: `min: 0.2, max: 0.8` keeps tasks of middling
    difficulty. Rows without a value (null or NaN) are rejected with reason `null` and never enter the statistic. With
    `over: all` rows that earlier operators took out count with the values they had then; only living rows are judged.
    """

    Config = GroupRewardRangeConfig

    def contract(self) -> Contract:
        """Reads the column; needs whole groups; rejects."""
        alive = ("alive",) if self.config.over == "all" else ()
        reads = frozenset((self.config.column, *alive))
        return Contract(reads=reads, scope="group", drops=True, over=self.config.over)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Compute every group's statistic and compare."""
        value, low, high = pl.col("value"), self.config.min, self.config.max
        # Sorted, so that sums and with them verdicts do not depend on the order of the rows.
        ordered = value.sort()
        statistic = {
            "mean": ordered.mean(),
            "min": value.min(),
            "max": value.max(),
            "median": value.median(),
            "range": value.max() - value.min(),
        }[self.config.statistic]
        living = pl.col("alive") if self.config.over == "all" else pl.lit(True)
        number = (pl.col(self.config.column) + 0).cast(pl.Float64).fill_nan(None)
        found = frame.select(
            "group_id", living.alias("living"), value=pl.when(number == 0).then(0.0).otherwise(number)
        ).with_columns(statistic=statistic.over("group_id"))
        shown = pl.col("statistic")
        too_low = pl.lit(False) if low is None else shown < low
        too_high = pl.lit(False) if high is None else shown > high
        reason = (
            pl.when(~pl.col("living"))
            .then(None)
            .when(value.is_null())
            .then(pl.lit("null"))
            .when(too_low)
            .then(pl.lit("too_low"))
            .when(too_high)
            .then(pl.lit("too_high"))
        )
        name = f"{self.config.statistic} of the group"
        detail = (
            pl.when(value.is_null())
            .then(pl.lit(f"no {self.config.column}"))
            .when(too_low)
            .then(pl.format("{} {} < min {}", pl.lit(name), shown, pl.lit(low)))
            .otherwise(pl.format("{} {} > max {}", pl.lit(name), shown, pl.lit(high)))
        )
        return Result(verdicts=verdicts_of(found, "reject", reason, detail=detail))
