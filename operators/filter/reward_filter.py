"""reward_filter: rows whose reward, or any other number, is out of range."""

from __future__ import annotations

import polars as pl
from pydantic import Field, model_validator

from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.verdicts import verdicts_of


class RewardFilterConfig(OperatorConfig):
    """The column and its inclusive limits."""

    column: str = Field("reward", description="numeric column: reward, a component, an info key")
    min: float | None = Field(None, description="smallest value that stays")
    max: float | None = Field(None, description="greatest value that stays")

    @model_validator(mode="after")
    def _limits_make_sense(self) -> RewardFilterConfig:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is greater than max {self.max}: no row could stay")
        return self


class RewardFilter(Operator[RewardFilterConfig]):
    """Rejects rows below `min` (`too_low`) or above `max` (`too_high`); without limits only rows without a number.

    Null and NaN are no numbers and are rejected with reason `null`: an answer that could not be scored is not a 0.
    """

    Config = RewardFilterConfig

    def contract(self) -> Contract:
        """Reads the column; rejects."""
        return Contract(reads=frozenset((self.config.column,)), drops=True)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Compare every value with the limits."""
        low, high = self.config.min, self.config.max
        value = pl.col("value")
        too_low = pl.lit(False) if low is None else value < low
        too_high = pl.lit(False) if high is None else value > high
        # `+ 0` makes text an error instead of casting it to numbers that are not there.
        number = (pl.col(self.config.column) + 0).cast(pl.Float64).fill_nan(None)
        # -0.0 is 0.0 here: which of the two `+ 0` leaves depends on how many rows there are, and the detail shows it.
        values = frame.select(value=pl.when(number == 0).then(0.0).otherwise(number))
        return Result(
            verdicts=verdicts_of(
                values,
                "reject",
                pl.when(value.is_null())
                .then(pl.lit("null"))
                .when(too_low)
                .then(pl.lit("too_low"))
                .when(too_high)
                .then(pl.lit("too_high")),
                detail=pl.when(too_low)
                .then(pl.format("{} < min {}", value, pl.lit(low)))
                .when(too_high)
                .then(pl.format("{} > max {}", value, pl.lit(high))),
            )
        )
