"""overlong_penalty: DAPO's soft punishment of replies that come near the length limit."""

from __future__ import annotations

import polars as pl
from pydantic import Field, model_validator

from operators.base import Context, Contract, Operator, Result, ScoreOperatorConfig


class OverlongPenaltyConfig(ScoreOperatorConfig):
    """The limit and the stretch before it in which the punishment grows."""

    max: int = Field(gt=0, description="sampled tokens from which the whole punishment applies (L_max)")
    cache: int = Field(gt=0, description="tokens before `max` over which it grows from 0 to -1 (L_cache)")

    @model_validator(mode="after")
    def _cache_fits(self) -> OverlongPenaltyConfig:
        if self.cache > self.max:
            raise ValueError(f"cache {self.cache} is greater than max {self.max}")
        return self


class OverlongPenalty(Operator[OverlongPenaltyConfig]):
    """Soft overlong punishment, DAPO equation 13 (arXiv 2503.14476).

    With n sampled tokens: 0 for n ≤ max - cache; (max - cache - n) / cache up to n = max, which gives -1; -1 beyond.
    """

    Config = OverlongPenaltyConfig

    def contract(self) -> Contract:
        """Reads token_count; scores its own component, which shapes the reward."""
        return Contract(reads=frozenset(("token_count",)), scores=(self.config.name,), shapes=True)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Compute the punishment of every row."""
        free = self.config.max - self.config.cache
        slope = (free - pl.col("token_count")).cast(pl.Float64) / self.config.cache
        # 0.0 + turns the -0.0 that a clip can give into 0.0.
        return Result(
            scores={self.config.name: frame.select((0.0 + slope.clip(-1.0, 0.0)).alias(self.config.name)).to_series()}
        )
