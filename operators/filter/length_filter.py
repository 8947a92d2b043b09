"""length_filter: rows whose text is too short or too long."""

from __future__ import annotations

from typing import Literal

import polars as pl
from pydantic import Field, model_validator

from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.verdicts import verdicts_of

_TOKEN_COLUMNS = {"response": "token_count", "prompt": "prompt_length"}


class LengthFilterConfig(OperatorConfig):
    """What is measured and its inclusive limits."""

    unit: Literal["char", "word", "token", "turn"] = Field(
        "char",
        description="char: Unicode characters; word: runs between blanks; token: the policy's tokens; turn: replies",
    )
    column: str = Field("response", description="text column; for tokens only response or prompt; not used for turns")
    min: int | None = Field(None, ge=0, description="smallest length that stays")
    max: int | None = Field(None, ge=0, description="greatest length that stays")

    @model_validator(mode="after")
    def _limits_make_sense(self) -> LengthFilterConfig:
        if self.min is None and self.max is None:
            raise ValueError("give min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is greater than max {self.max}: no row could stay")
        if self.unit == "token" and self.column not in _TOKEN_COLUMNS:
            raise ValueError(f"tokens of {self.column!r} are not known: column is response or prompt")
        return self


class LengthFilter(Operator[LengthFilterConfig]):
    """Rejects rows shorter than `min` (`too_short`) or longer than `max` (`too_long`); both limits stay in.

    Tokens are counted as the policy saw them: `token_count` (sampled tokens) for the response, `prompt_length` for the
    prompt. Text rows have no tokens and count 0. A null text is rejected with reason `null`.
    """

    Config = LengthFilterConfig

    def contract(self) -> Contract:
        """Reads the measured column; rejects."""
        return Contract(reads=frozenset((self._column(),)), drops=True)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Compare every row's length with the limits."""
        low, high, unit = self.config.min, self.config.max, self.config.unit
        lengths = frame.select(length=self._length())
        length = pl.col("length")
        too_short = pl.lit(False) if low is None else length < low
        too_long = pl.lit(False) if high is None else length > high
        return Result(
            verdicts=verdicts_of(
                lengths,
                "reject",
                pl.when(length.is_null())
                .then(pl.lit("null"))
                .when(too_short)
                .then(pl.lit("too_short"))
                .when(too_long)
                .then(pl.lit("too_long")),
                detail=pl.when(too_short)
                .then(pl.format("{} {}s < min {}", length, pl.lit(unit), pl.lit(low)))
                .when(too_long)
                .then(pl.format("{} {}s > max {}", length, pl.lit(unit), pl.lit(high))),
            )
        )

    def _column(self) -> str:
        if self.config.unit == "turn":
            return "turns"
        return _TOKEN_COLUMNS[self.config.column] if self.config.unit == "token" else self.config.column

    def _length(self) -> pl.Expr:
        column = pl.col(self._column())
        if self.config.unit == "char":
            return column.str.len_chars()
        return column.str.count_matches(r"\S+") if self.config.unit == "word" else column
