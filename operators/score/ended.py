"""ended: whether the model finished its reply by itself."""

from __future__ import annotations

import polars as pl
from pydantic import Field

from operators.base import Context, Contract, Operator, Result, ScoreOperatorConfig


class EndedConfig(ScoreOperatorConfig):
    """Only the weight, 0 by default."""

    weight: float = Field(0.0, description="share of the component in the reward; 0 makes it a metric only")


class Ended(Operator[EndedConfig]):
    """Scores 1 where the model itself sampled the end of its last reply, else 0; null where that is not known."""

    Config = EndedConfig

    def contract(self) -> Contract:
        """Reads eos_sampled; scores its own component."""
        return Contract(reads=frozenset(("eos_sampled",)), scores=(self.config.name,))

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Turn the truth value into a number."""
        return Result(scores={self.config.name: frame["eos_sampled"].cast(pl.Float64).alias(self.config.name)})
