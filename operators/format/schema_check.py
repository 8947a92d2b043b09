"""schema_check: columns that must hold what they are meant to hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import polars as pl
from pydantic import Field, model_validator

from buffer_engine.config import ComponentConfig
from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.expressions import Pattern
from operators.verdicts import verdicts_of


class ColumnRule(ComponentConfig):
    """What one column must hold."""

    type: Literal["text", "number", "integer", "boolean"] | None = Field(
        None, description="type of the column, checked before any row is read; null: any"
    )
    nullable: bool = Field(False, description="whether null (and NaN) is fine")
    min: float | None = Field(None, description="least number; least length in characters for text")
    max: float | None = Field(None, description="greatest number; greatest length in characters for text")
    pattern: Pattern | None = Field(None, description="regular expression that the whole text must match")
    choices: tuple[str | int | float | bool, ...] | None = Field(None, min_length=1, description="values allowed")

    @model_validator(mode="after")
    def _limits_make_sense(self) -> ColumnRule:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is greater than max {self.max}: no row could stay")
        if self.pattern is not None and self.type not in (None, "text"):
            raise ValueError(f"a pattern is for text, not for {self.type}")
        return self


class SchemaCheckConfig(OperatorConfig):
    """The rules by column."""

    columns: Mapping[str, ColumnRule] = Field(min_length=1, description="column → what it must hold; first one first")


class SchemaCheck(Operator[SchemaCheckConfig]):
    """Rejects rows in which a column breaks its rule; the first broken rule gives the reason, columns in their order.

    Reasons: `null` (also NaN) unless nullable; `not_a_choice`; `too_small`, `too_large` for numbers, `too_short`,
    `too_long` for text, both limits staying in; `pattern` when the whole text does not match. A null that is allowed
    passes every other rule. A column of another type than its rule says is a mistake in the pipeline, found before any
    row is read.
    """

    Config = SchemaCheckConfig

    def contract(self) -> Contract:
        """Reads the columns with rules; rejects."""
        return Contract(reads=frozenset(self.config.columns), drops=True)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Hold every column against its rule."""
        reasons: list[pl.Expr] = []
        details: list[pl.Expr] = []
        for name, rule in self.config.columns.items():
            for broken, reason, detail in _rules(name, rule, frame.schema[name]):
                reasons.append(pl.when(broken.fill_null(False)).then(pl.lit(reason)))
                details.append(pl.when(broken.fill_null(False)).then(detail))
        return Result(verdicts=verdicts_of(frame, "reject", pl.coalesce(reasons), detail=pl.coalesce(details)))


def _rules(name: str, rule: ColumnRule, dtype: pl.DataType) -> list[tuple[pl.Expr, str, pl.Expr]]:
    """(condition that breaks it, reason, detail) of every part of a rule."""
    _check_type(name, rule, dtype)
    column = pl.col(name)
    if dtype.is_float():
        column = column.fill_nan(None)
    said = pl.lit(f"{name} is ")
    rules: list[tuple[pl.Expr, str, pl.Expr]] = []
    if not rule.nullable:
        rules.append((column.is_null(), "null", pl.lit(f"{name} is null")))
    if rule.choices is not None:
        listed = pl.Series(rule.choices, dtype=dtype, strict=True)
        shown = pl.format("{}{}, not one of {} values", said, column.cast(pl.String), pl.lit(len(rule.choices)))
        rules.append((~column.is_in(listed.implode()), "not_a_choice", shown))
    text = dtype == pl.String
    measured = column.str.len_chars() if text else column
    unit = " characters" if text else ""
    for limit, reason, broken in (
        (rule.min, "too_short" if text else "too_small", lambda value, limit: value < limit),
        (rule.max, "too_long" if text else "too_large", lambda value, limit: value > limit),
    ):
        if limit is not None:
            word = "min" if limit is rule.min else "max"
            shown = pl.format("{}{}{}, {} {}", said, measured, pl.lit(unit), pl.lit(word), pl.lit(f"{limit:g}"))
            rules.append((broken(measured, limit), reason, shown))
    if rule.pattern is not None:
        matches = column.str.contains(rf"\A(?:{rule.pattern})\z")
        rules.append((~matches, "pattern", pl.lit(f"{name} does not match {rule.pattern}")))
    return rules


def _check_type(name: str, rule: ColumnRule, dtype: pl.DataType) -> None:
    fits = {
        "text": dtype == pl.String,
        "number": dtype.is_numeric(),
        "integer": dtype.is_integer(),
        "boolean": dtype == pl.Boolean,
    }
    if rule.type is not None and not fits[rule.type]:
        raise TypeError(f"column {name!r} is {dtype}, not {rule.type}")
    if rule.pattern is not None and dtype != pl.String:
        raise TypeError(f"column {name!r} is {dtype}, and a pattern is for text")
    if (rule.min is not None or rule.max is not None) and not (dtype.is_numeric() or dtype == pl.String):
        raise TypeError(f"column {name!r} is {dtype}, and min and max are for numbers and text")
