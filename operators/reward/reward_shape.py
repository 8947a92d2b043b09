"""reward_shape: a reward component computed from other columns."""

from __future__ import annotations

import polars as pl
from pydantic import Field, model_validator

from operators.base import Context, Contract, Operator, Result, RowError, ScoreOperatorConfig
from operators.expressions import RowExpression, roots, row_expression


class RewardShapeConfig(ScoreOperatorConfig):
    """The expression and the range it is clipped to."""

    expr: RowExpression = Field(
        description="SQL expression over the row's columns, e.g. CASE WHEN token_count > 200 THEN -0.2 ELSE 0 END"
    )
    clip: tuple[float, float] | None = Field(None, description="least and greatest value; null: not clipped")

    @model_validator(mode="after")
    def _range_is_ordered(self) -> RewardShapeConfig:
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise ValueError(f"clip {list(self.clip)} is empty: write [least, greatest]")
        return self


class RewardShape(Operator[RewardShapeConfig]):
    """Writes the value of a SQL expression over columns, components and `reward` as a component of its own.

    The component is added to the reward like any other: to replace what earlier operators gave, set their weight to 0.
    Division of whole numbers is whole (1/2 is 0; write 1.0/2). A null value cannot be scored; a value that is not
    finite is an error of its row, clipped or not.
    """

    Config = RewardShapeConfig

    def contract(self) -> Contract:
        """Reads what the expression names; scores its own component, which shapes the reward."""
        return Contract(reads=roots(row_expression(self.config.expr)), scores=(self.config.name,), shapes=True)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Evaluate the expression on every row."""
        # `+ 0` makes text an error instead of reading numbers out of it; with_columns repeats a constant for every row.
        value = (row_expression(self.config.expr) + 0).cast(pl.Float64).alias(self.config.name)
        raw = frame.with_columns(value)[self.config.name]
        bad = (~raw.is_finite()).fill_null(False)
        values = raw.set(bad, None)
        if self.config.clip is not None:
            values = values.clip(*self.config.clip)
        errors = [RowError(row, f"{self.config.expr} is {raw[row]}") for row in bad.arg_true()]
        return Result(scores={self.config.name: values.alias(self.config.name)}, errors=errors)
