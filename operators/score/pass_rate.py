"""pass_rate: how often a task was solved, as a number of each of its rows."""

from __future__ import annotations

from typing import Literal

import polars as pl
from pydantic import Field

from operators.base import Context, Contract, Operator, Result, ScoreOperatorConfig


class PassRateConfig(ScoreOperatorConfig):
    """What counts as solved, and over which rows."""

    weight: float = Field(0.0, description="share of the component in the reward; 0 makes it a metric only")
    column: str = Field("reward", description="numeric column: a measured component rather than a shaped reward")
    threshold: float = Field(1.0, description="values from here on count as solved")
    by: Literal["group", "task"] = Field("group", description="rows counted together: of a group, or of a task")
    confidence: float = Field(1.96, gt=0, description="standard normal quantile of the interval; 1.96 covers 95 %")


class PassRate(Operator[PassRateConfig]):
    """Scores every row with the share of solved rows in its group or task, in this pass.

    Beside it stand the metrics `_n` (rows that count), `_low` and `_high` (Wilson's interval for the rate). Rows
    without a value (null or NaN) do not count; where none counts, rate and interval are null and n is 0. Only rows
    that are still there count, so stand above the filters. 1 minus the rate is the task's difficulty: `curriculum` and
    read policies (`by: score:pass_rate`) can use it.
    """

    Config = PassRateConfig

    def contract(self) -> Contract:
        """Reads the column; needs whole groups, or all rows; scores the rate and its metrics."""
        name = self.config.name
        return Contract(
            reads=frozenset((self.config.column,)),
            scores=(name, f"{name}_n", f"{name}_low", f"{name}_high"),
            scope="group" if self.config.by == "group" else "frame",
        )

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Count."""
        name, z, key = self.config.name, self.config.confidence, f"{self.config.by}_id"
        value = (pl.col(self.config.column) + 0).cast(pl.Float64).fill_nan(None)
        n = value.count().over(key).cast(pl.Float64)
        solved = (value >= self.config.threshold).sum().over(key).cast(pl.Float64)
        counted = frame.select(n=n, rate=pl.when(n > 0).then(solved / n))
        rate, n = pl.col("rate"), pl.col("n")
        centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * (rate * (1 - rate) / n + z * z / (4 * n * n)).sqrt()
        found = counted.select(
            rate.alias(name),
            n.alias(f"{name}_n"),
            pl.when(n > 0).then((centre - half).clip(0, 1)).alias(f"{name}_low"),
            pl.when(n > 0).then((centre + half).clip(0, 1)).alias(f"{name}_high"),
        )
        return Result(scores={series.name: series for series in found})
