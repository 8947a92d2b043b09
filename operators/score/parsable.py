"""parsable: whether an answer can be found in the reply at all."""

from __future__ import annotations

from typing import Literal

import polars as pl
from pydantic import Field

from operators.base import Context, Contract, Operator, Result, ScoreOperatorConfig
from operators.expressions import Pattern


class ParsableConfig(ScoreOperatorConfig):
    """The pattern of a well-formed reply."""

    weight: float = Field(0.0, description="share of the component in the reward; 0 makes it a metric only")
    column: str = Field("response", description="text column")
    pattern: Pattern = Field(description="regular expression")
    mode: Literal["full", "find"] = Field("find", description="full: the whole text matches; find: some part matches")


class Parsable(Operator[ParsableConfig]):
    """Scores 1 where the text has the form `pattern`, else 0; null text cannot be scored.

    By default a metric without weight: it tells gain in form apart from gain in skill.
    """

    Config = ParsableConfig

    def contract(self) -> Contract:
        """Reads the column; scores its own component."""
        return Contract(reads=frozenset((self.config.column,)), scores=(self.config.name,))

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Match every row."""
        pattern = rf"\A(?:{self.config.pattern})\z" if self.config.mode == "full" else self.config.pattern
        found = pl.col(self.config.column).str.contains(pattern).cast(pl.Float64).alias(self.config.name)
        return Result(scores={self.config.name: frame.select(found).to_series()})
