"""group_reward_std: groups whose members all got the same, from which nothing can be learned."""

from __future__ import annotations

from typing import Literal

import polars as pl
from pydantic import Field

from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.verdicts import verdicts_of

_RELATIVE_RANGE = 1e-9


class GroupRewardStdConfig(OperatorConfig):
    """The number that must differ within a group, and by how much."""

    column: str = Field("reward", description="numeric column: a measured component rather than a shaped reward")
    min_std: float = Field(
        1e-6, ge=0, description="least population standard deviation that stays; 0: any difference beyond rounding"
    )
    over: Literal["survivors", "all"] = Field(
        "survivors", description="which members count: those still there, or also those that operators before took out"
    )


class GroupRewardStd(Operator[GroupRewardStdConfig]):
    """Rejects whole groups without spread in `column`: their advantages would all be zero.

    Reasons: `all_equal` where the range is at most 1e-9·max(1, |mean|), whatever `min_std` is; `low_std` where the
    population standard deviation (float64) is below `min_std`; `singleton` where only one member has a value. Rows
    without a value (null or NaN) are rejected with reason `null` and never enter the statistics of their group. With
    `over: all` rows that earlier operators rejected or hold count with the values they had then; only living rows are
    judged. With `where`, only the rows that match are members.
    """

    Config = GroupRewardStdConfig

    def contract(self) -> Contract:
        """Reads the column; needs whole groups; rejects."""
        alive = ("alive",) if self.config.over == "all" else ()
        reads = frozenset((self.config.column, *alive))
        return Contract(reads=reads, scope="group", drops=True, over=self.config.over)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Compute each group's spread and reject the groups without one."""
        # Sorting within the group makes the sums, and so the verdict, independent of the order of the rows.
        value, limit = pl.col("value"), self.config.min_std
        living = pl.col("alive") if self.config.over == "all" else pl.lit(True)
        values = frame.select(
            "group_id", living.alias("living"), value=(pl.col(self.config.column) + 0).cast(pl.Float64).fill_nan(None)
        ).with_columns(
            count=value.count().over("group_id"),
            mean=value.sort().mean().over("group_id"),
            std=value.sort().std(ddof=0).over("group_id"),
            range=(value.max() - value.min()).over("group_id"),
        )
        flat = pl.col("range") <= _RELATIVE_RANGE * pl.max_horizontal(pl.lit(1.0), pl.col("mean").abs())
        reason = (
            pl.when(~pl.col("living"))
            .then(None)
            .when(value.is_null())
            .then(pl.lit("null"))
            .when(pl.col("count") == 1)
            .then(pl.lit("singleton"))
            .when(flat)
            .then(pl.lit("all_equal"))
            .when(pl.col("std") < limit)
            .then(pl.lit("low_std"))
        )
        detail = (
            pl.when(value.is_null())
            .then(pl.lit(f"no {self.config.column}"))
            .when(pl.col("count") == 1)
            .then(pl.lit(f"the only member with {self.config.column}"))
            .otherwise(pl.format("std {} of {} rows, min_std {}", pl.col("std"), pl.col("count"), pl.lit(limit)))
        )
        return Result(verdicts=verdicts_of(values, "reject", reason, detail=detail))
