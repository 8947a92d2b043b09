"""credit_assign: the outcome of an episode as the reward of each of its turns."""

from __future__ import annotations

from typing import Literal

import polars as pl
from pydantic import Field, model_validator

from operators.base import Context, Contract, Operator, Result, ScoreOperatorConfig


class CreditAssignConfig(ScoreOperatorConfig):
    """Whose outcome is spread, and how."""

    column: str = Field(description="numeric column whose value on the last turn is the outcome; a component with "
                        "weight 0, for the result joins the reward")  # fmt: skip
    method: Literal["last", "uniform", "same", "discounted"] = Field(
        "discounted",
        description="last: all to the last turn, 0 to the others; uniform: outcome / turns to each; same: the whole "
        "outcome to each; discounted: outcome · gamma^(turns still to come)",
    )
    gamma: float | None = Field(None, gt=0, le=1, description="discount for each turn still to come; for discounted")

    @model_validator(mode="after")
    def _gamma_is_used(self) -> CreditAssignConfig:
        if (self.method == "discounted") != (self.gamma is not None):
            raise ValueError("method: discounted needs `gamma`, and no other method takes it")
        return self


class CreditAssign(Operator[CreditAssignConfig]):
    """Spreads the outcome of an episode over the rows of its turns, as a component of its own.

    Rows with the same group_id, sample_index and attempt are one episode, their turn_index is its order (gaps do not
    count as turns), and the value of the last one is the outcome: what `column` says of earlier turns is not looked
    at. Where the outcome is null or NaN, no turn can be scored. An episode of one row keeps its whole outcome with
    every method. Turns that earlier operators took out are no turns: stand above the filters. Credit within a row,
    token by token, is the algorithm's business.
    """

    Config = CreditAssignConfig

    def contract(self) -> Contract:
        """Reads the outcome and the places of the turns; needs whole groups; scores its own component."""
        reads = frozenset((self.config.column, "sample_index", "attempt", "turn_index"))
        return Contract(reads=reads, scores=(self.config.name,), scope="group", shapes=True)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Find each episode's outcome and share it out."""
        episode = ["group_id", "sample_index", "attempt"]
        value = (pl.col(self.config.column) + 0).cast(pl.Float64).fill_nan(None)
        turns = frame.select(*episode, "turn_index", "experience_id", value=value).with_columns(
            outcome=pl.col("value").sort_by("turn_index", "experience_id").last().over(episode),
            turns=pl.len().over(episode).cast(pl.Float64),
            # The id decides between rows that claim the same turn, so that the order of rows does not.
            place=pl.struct("turn_index", "experience_id").rank("ordinal").over(episode).cast(pl.Float64),
        )
        outcome, to_come = pl.col("outcome"), pl.col("turns") - pl.col("place")
        credit = {
            "last": pl.when(to_come == 0).then(outcome).when(outcome.is_not_null()).then(0.0),
            "uniform": outcome / pl.col("turns"),
            "same": outcome,
            "discounted": outcome * pl.lit(self.config.gamma or 1.0).pow(to_come),
        }[self.config.method]
        return Result(scores={self.config.name: turns.select(credit.alias(self.config.name)).to_series()})
