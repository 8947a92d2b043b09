"""Short ways to write the verdicts of an operator."""

from __future__ import annotations

import polars as pl

from operators.base import VERDICT_SCHEMA, Verdict


def no_verdicts() -> pl.DataFrame:
    """An empty table of verdicts."""
    return pl.DataFrame(schema=VERDICT_SCHEMA)


def verdicts_of(
    frame: pl.DataFrame,
    verdict: Verdict,
    reason: pl.Expr,
    *,
    detail: pl.Expr | None = None,
    ref_id: pl.Expr | None = None,
) -> pl.DataFrame:
    """One verdict for every row of `frame` where `reason` (text over its columns) is not null.

    `detail` and `ref_id` are expressions over the same columns; left out they are null.
    """
    empty = pl.lit(None, dtype=pl.String)
    return (
        frame.select(
            pl.int_range(pl.len(), dtype=pl.UInt32).alias("row"),
            pl.lit(verdict).alias("verdict"),
            reason.cast(pl.String).alias("reason"),
            (empty if detail is None else detail.cast(pl.String)).alias("detail"),
            (empty if ref_id is None else ref_id.cast(pl.String)).alias("ref_id"),
        )
        .filter(pl.col("reason").is_not_null())
        .select(list(VERDICT_SCHEMA))
    )
