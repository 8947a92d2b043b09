"""dynamic_sampling: groups that are neither all right nor all wrong."""

from __future__ import annotations

from typing import Literal

import polars as pl
from pydantic import Field

from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.verdicts import verdicts_of


class DynamicSamplingConfig(OperatorConfig):
    """What counts as right."""

    column: str = Field("reward", description="numeric column: a measured component rather than a shaped reward")
    threshold: float = Field(1.0, description="values from here on are right")
    over: Literal["survivors", "all"] = Field(
        "survivors", description="which members count: those still there, or also those that operators before took out"
    )


class DynamicSampling(Operator[DynamicSamplingConfig]):
    """Keeps groups with 0 < right answers < members, as DAPO does (arXiv 2503.14476, equation 11).

    Reasons: `all_right`, `all_wrong`, with the numbers as detail. A row without a value (null or NaN) is no member: it
    is rejected with reason `null`. A single member is all right or all wrong. With `over: all` rows that earlier
    operators took out count with the values they had then; only living rows are judged. With `where`, only the rows
    that match are members. The loop explores again when a batch falls short (`loop.max_refills`).
    """

    Config = DynamicSamplingConfig

    def contract(self) -> Contract:
        """Reads the column; needs whole groups; rejects."""
        alive = ("alive",) if self.config.over == "all" else ()
        reads = frozenset((self.config.column, *alive))
        return Contract(reads=reads, scope="group", drops=True, over=self.config.over)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Count the right answers of every group."""
        living = pl.col("alive") if self.config.over == "all" else pl.lit(True)
        value = pl.col("value")
        counted = frame.select(
            "group_id", living.alias("living"), value=(pl.col(self.config.column) + 0).cast(pl.Float64).fill_nan(None)
        ).with_columns(
            right=(value >= self.config.threshold).sum().over("group_id"), members=value.count().over("group_id")
        )
        reason = (
            pl.when(~pl.col("living"))
            .then(None)
            .when(value.is_null())
            .then(pl.lit("null"))
            .when(pl.col("right") == 0)
            .then(pl.lit("all_wrong"))
            .when(pl.col("right") == pl.col("members"))
            .then(pl.lit("all_right"))
        )
        detail = (
            pl.when(value.is_null())
            .then(pl.lit(f"no {self.config.column}"))
            .otherwise(pl.format("{} of {} right", "right", "members"))
        )
        return Result(verdicts=verdicts_of(counted, "reject", reason, detail=detail))
