"""curriculum: rows by their difficulty."""

from __future__ import annotations

from typing import Literal

import polars as pl
from pydantic import Field, model_validator

from operators.base import Context, Contract, Operator, Result, RowError, ScoreOperatorConfig
from operators.expressions import RowExpression, roots, row_expression
from operators.verdicts import verdicts_of


class CurriculumConfig(ScoreOperatorConfig):
    """What difficulty is, and what is done with it."""

    weight: float = Field(0.0, description="share of the component in the reward; 0 makes it a metric only")
    expr: RowExpression = Field(description="SQL expression of a row's difficulty, e.g. 1 - pass_rate")
    method: Literal["sort", "band", "top_k", "fold"] = Field(
        "sort",
        description="sort: only number the rows; band: reject what is out of [low, high]; top_k: reject all but the k "
        "first groups; fold: deal the sorted groups into layers, each a pass from easy to hard",
    )
    order: Literal["easy_first", "hard_first"] = Field("easy_first", description="which end comes first")
    low: float | None = Field(None, description="band: least difficulty that stays")
    high: float | None = Field(None, description="band: greatest difficulty that stays")
    k: int | None = Field(None, ge=1, description="top_k: groups that stay")
    layers: int | None = Field(None, ge=2, description="fold: number of layers")

    @model_validator(mode="after")
    def _fields_fit_the_method(self) -> CurriculumConfig:
        needs = {"sort": (), "band": ("low", "high"), "top_k": ("k",), "fold": ("layers",)}
        given = [name for name in ("low", "high", "k", "layers") if getattr(self, name) is not None]
        wrong = [name for name in given if name not in needs[self.method]]
        if wrong:
            raise ValueError(f"{wrong[0]} means nothing to method {self.method}")
        if needs[self.method] and not given:
            raise ValueError(f"method {self.method} needs {' or '.join(needs[self.method])}")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low {self.low} is greater than high {self.high}: no row could stay")
        return self


class Curriculum(Operator[CurriculumConfig]):
    """Numbers groups by difficulty, and rejects those outside a band or beyond the first k.

    A group's difficulty is the mean of the expression over its rows that have one. The component is the group's place
    from 0 (first) towards 1, the same for all its rows: a read policy with `by: score:<id>, favor: low` trains in this
    order, for the store itself keeps rows in order of arrival. Groups of equal difficulty come in the order of their
    ids. fold deals the sorted groups to the layers in turn and numbers layer by layer, so that each layer runs from
    easy to hard. Reasons: `too_easy`, `too_hard`, `beyond_k`, and `null` for rows of groups without a difficulty. A
    value that is not finite is an error of its row.
    """

    Config = CurriculumConfig

    def contract(self) -> Contract:
        """Reads what the expression names; needs all rows; scores the place; may reject."""
        reads = roots(row_expression(self.config.expr))
        return Contract(reads=reads, scores=(self.config.name,), scope="frame", drops=True)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Sort the groups and number them."""
        config = self.config
        raw = frame.with_columns((row_expression(config.expr) + 0).cast(pl.Float64).alias("value__"))["value__"]
        bad = (~raw.is_finite()).fill_null(False)
        rows = frame.select("group_id").with_columns(value=raw.set(bad, None))
        # Sorted, so that means do not depend on the order of the rows.
        groups = rows.group_by("group_id").agg(pl.col("value").drop_nulls().sort().mean())
        groups = groups.filter(pl.col("value").is_not_null()).sort(
            "value", "group_id", descending=[config.order == "hard_first", False]
        )
        groups = groups.with_columns(place=self._places(groups.height))
        found = rows.select("group_id").join(groups, on="group_id", how="left", maintain_order="left")
        place = (pl.col("place") / max(groups.height, 1)).cast(pl.Float64).alias(config.name)
        judged = found.with_columns(bad=bad).with_columns(reason=self._reason())
        detail = (
            pl.when(pl.col("value").is_null())
            .then(pl.lit("no difficulty"))
            .when(pl.col("reason") == "beyond_k")
            .then(pl.format("number {} of {}", pl.col("place") + 1, pl.lit(groups.height)))
            .otherwise(pl.format("difficulty {}", pl.col("value")))
        )
        return Result(
            scores={config.name: found.select(place).to_series()},
            verdicts=verdicts_of(judged, "reject", pl.when(~pl.col("bad")).then(pl.col("reason")), detail=detail),
            errors=[RowError(row, f"{config.expr} is {raw[row]}") for row in bad.arg_true()],
        )

    def _places(self, height: int) -> pl.Series:
        """The place of each sorted group, from 0."""
        order = list(range(height))
        if self.config.layers is not None:
            order = sorted(order, key=lambda rank: (rank % (self.config.layers or 1), rank))
        places = [0] * height
        for place, rank in enumerate(order):
            places[rank] = place
        return pl.Series("place", places, pl.Int64)

    def _reason(self) -> pl.Expr:
        value, config = pl.col("value"), self.config
        nothing = pl.lit(False)
        return (
            pl.when(value.is_null())
            .then(pl.lit("null"))
            .when(nothing if config.low is None else value < config.low)
            .then(pl.lit("too_easy"))
            .when(nothing if config.high is None else value > config.high)
            .then(pl.lit("too_hard"))
            .when(nothing if config.k is None else pl.col("place") >= config.k)
            .then(pl.lit("beyond_k"))
        )
