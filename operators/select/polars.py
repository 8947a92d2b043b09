"""polars: a Polars expression as an operator."""

from __future__ import annotations

from typing import Literal

import polars as pl
from pydantic import Field, model_validator

from operators.base import Context, Contract, Operator, Result, RowError, ScoreOperatorConfig
from operators.expressions import roots
from operators.polars_text import polars_expression
from operators.verdicts import verdicts_of

_TYPES: dict[str, pl.DataType] = {
    "text": pl.String(), "number": pl.Float64(), "integer": pl.Int64(), "boolean": pl.Boolean(),
}  # fmt: skip


class PolarsConfig(ScoreOperatorConfig):
    """The expression, what it sees, and what becomes of its value."""

    weight: float = Field(0.0, description="share of the score in the reward, with use: score")
    expr: str = Field(min_length=1, description="Polars expression, e.g. pl.col('response').str.len_chars() > 3")
    use: Literal["keep", "score", "column"] = Field(
        "keep",
        description="keep: rows where it is false or null are rejected; score: a component; column: a column",
    )
    into: str | None = Field(None, description="name of the new column, with use: column")
    dtype: Literal["text", "number", "integer", "boolean"] = Field("text", description="type of the new column")
    scope: Literal["row", "group", "frame"] = Field(
        "row", description="what the expression goes over: each row alone, the rows of a group, or all rows"
    )
    reason: str = Field("not_selected", min_length=1, description="reason of rows that are not kept")

    @model_validator(mode="after")
    def _fits_together(self) -> PolarsConfig:
        if (self.use == "column") != (self.into is not None):
            raise ValueError("use: column needs `into`, and only use: column takes it")
        if self.weight and self.use != "score":
            raise ValueError(f"use: {self.use} gives no score that could have a weight")
        polars_expression(self.expr, self.scope)
        return self


class Polars(Operator[PolarsConfig]):
    """Keeps, scores or derives with a Polars expression, which is read and not run as Python.

    Known are columns, numbers, texts and the methods of expressions that compute (`operators.polars_text`); functions
    of Python are not. With scope group aggregates and shifts go over the rows of the group, with frame over all rows,
    in the order of their ids: which rows share a batch must not matter. Use keep: true keeps, false and null reject
    with `reason`. Use score: null cannot be scored, a number that is not finite is an error of its row. Use column: the
    value must be of `dtype`.
    """

    Config = PolarsConfig

    def contract(self) -> Contract:
        """Reads what the expression names; keeps, scores or writes."""
        use, name = self.config.use, self.config.name
        return Contract(
            reads=roots(self._expression()),
            writes={self.config.into: _TYPES[self.config.dtype]} if self.config.into is not None else {},
            scores=(name,) if use == "score" else (),
            scope=self.config.scope,
            drops=use == "keep",
        )

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Evaluate the expression."""
        ordered = frame.with_row_index("row__").sort("experience_id")
        expression = self._expression()
        if self.config.scope == "group":
            expression = expression.over("group_id")
        values = ordered.with_columns(expression.alias("value__")).sort("row__")["value__"]
        if self.config.use == "keep":
            if not (values.dtype == pl.Boolean or values.dtype == pl.Null):
                raise TypeError(f"the expression gives {values.dtype}, not true or false")
            gone = ~values.cast(pl.Boolean).fill_null(False)
            reason = pl.when("gone").then(pl.lit(self.config.reason))
            detail = pl.lit(f"not ({self.config.expr})")
            return Result(verdicts=verdicts_of(gone.alias("gone").to_frame(), "reject", reason, detail=detail))
        if self.config.into is not None:
            wanted = _TYPES[self.config.dtype]
            if values.dtype != wanted and not (values.dtype.is_integer() and wanted.is_numeric()):
                raise TypeError(f"the expression gives {values.dtype}, not {self.config.dtype}")
            return Result(columns={self.config.into: values.cast(wanted).alias(self.config.into)})
        if not (values.dtype.is_numeric() or values.dtype == pl.Boolean or values.dtype == pl.Null):
            raise TypeError(f"the expression gives {values.dtype}, not a number")
        numbers = values.cast(pl.Float64).alias(self.config.name)
        bad = (~numbers.is_finite()).fill_null(False)
        errors = [RowError(row, f"{self.config.expr} is {numbers[row]}") for row in bad.arg_true()]
        return Result(scores={self.config.name: numbers.set(bad, None)}, errors=errors)

    def _expression(self) -> pl.Expr:
        return polars_expression(self.config.expr, self.config.scope)
