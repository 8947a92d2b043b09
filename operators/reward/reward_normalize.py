"""reward_normalize: a reward relative to those of its group or batch."""

from __future__ import annotations

from typing import Literal

import polars as pl
from pydantic import Field

from operators.base import Context, Contract, Operator, Result, RowError, ScoreOperatorConfig


class RewardNormalizeConfig(ScoreOperatorConfig):
    """What is made relative, to whom, and how."""

    column: str = Field(description="numeric column, usually a component with weight 0: the result joins the reward")
    by: Literal["group", "batch"] = Field("group", description="rows compared: of the group, or all of the pass")
    method: Literal["zscore", "minmax", "rank", "leave_one_out"] = Field(
        "zscore",
        description="zscore: (x - mean) / (std + eps), sample standard deviation; minmax: (x - least) / (greatest - "
        "least); rank: average rank from 0 to 1; leave_one_out: x minus the mean of the others",
    )
    eps: float = Field(1e-6, ge=0, description="added to the standard deviation")


class RewardNormalize(Operator[RewardNormalizeConfig]):
    """Writes a column relative to its group or batch as a component of its own; the raw values stay as they are.

    The component is added to the reward like any other: give the raw component weight 0, or both count. Rows without a
    value (null or NaN) do not enter the comparison and are not scored (null). Without spread (range at most
    1e-9·max(1, |mean|)) or with one value only, zscore, minmax and leave_one_out give 0 and rank gives 0.5; equal
    values share their average rank. Where numbers are so large that the result is not finite, it is an error of its
    row. Baselines that belong to an algorithm are better left to its advantage: this is for bringing several rewards
    to one scale.
    """

    Config = RewardNormalizeConfig

    def contract(self) -> Contract:
        """Reads the column; needs whole groups, or all rows; scores its own component, which shapes the reward."""
        return Contract(
            reads=frozenset((self.config.column,)),
            scores=(self.config.name,),
            scope="group" if self.config.by == "group" else "frame",
            shapes=True,
        )

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Compare every value with the others."""
        key = pl.col("group_id") if self.config.by == "group" else pl.lit("batch").alias("group_id")
        value = pl.col("value")
        # Sums over sorted values do not depend on the order of the rows.
        ordered = value.drop_nulls().sort()
        found = frame.select(key, value=(pl.col(self.config.column) + 0).cast(pl.Float64).fill_nan(None)).with_columns(
            n=value.count().over("group_id"),
            mean=ordered.mean().over("group_id"),
            std=ordered.std(ddof=1).over("group_id"),
            least=value.min().over("group_id"),
            greatest=value.max().over("group_id"),
            rank=value.rank("average").over("group_id"),
        )
        n, mean = pl.col("n"), pl.col("mean")
        extent = pl.col("greatest") - pl.col("least")
        flat = (n < 2) | (extent <= 1e-9 * pl.max_horizontal(pl.lit(1.0), mean.abs()))
        relative = {
            "zscore": (value - mean) / (pl.col("std") + self.config.eps),
            "minmax": (value - pl.col("least")) / extent,
            "rank": (pl.col("rank") - 1) / (n - 1),
            "leave_one_out": (value - mean) * n / (n - 1),
        }[self.config.method]
        still = 0.5 if self.config.method == "rank" else 0.0
        scored = pl.when(value.is_null()).then(None).when(flat).then(still).otherwise(relative)
        raw = found.select(scored.cast(pl.Float64).alias(self.config.name)).to_series()
        bad = (~raw.is_finite()).fill_null(False)
        said = f"the {self.config.method} of {{}} is {{}}"
        errors = [RowError(row, said.format(found["value"][row], raw[row])) for row in bad.arg_true()]
        return Result(scores={self.config.name: raw.set(bad, None)}, errors=errors)
