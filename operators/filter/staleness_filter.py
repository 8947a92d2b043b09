"""staleness_filter: rows sampled by weights that are too old."""

from __future__ import annotations

import polars as pl
from pydantic import Field

from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.verdicts import verdicts_of


class StalenessFilterConfig(OperatorConfig):
    """How old a row may be."""

    max_lag: int = Field(
        ge=0, description="most weight versions between the row's oldest token and the current weights"
    )


class StalenessFilter(Operator[StalenessFilterConfig]):
    """Rejects rows whose oldest token was sampled more than `max_lag` weight versions ago, with reason `stale`.

    Rows without a weight version (imported, written by people) have no age and are kept.
    """

    Config = StalenessFilterConfig

    def contract(self) -> Contract:
        """Reads model_version; rejects."""
        return Contract(reads=frozenset(("model_version",)), drops=True)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Compare every row's version with the current one."""
        lag = pl.lit(context.model_version, dtype=pl.Int64) - pl.col("model_version")
        limit = self.config.max_lag
        return Result(
            verdicts=verdicts_of(
                frame,
                "reject",
                pl.when(lag > limit).then(pl.lit("stale")),
                detail=pl.format("lag {} > max_lag {}", lag, pl.lit(limit)),
            )
        )
