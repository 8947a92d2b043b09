"""Which of several like rows is looked at first, and which rows are compared at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl


def by_preference(frame: pl.DataFrame, by: str | None) -> list[int]:
    """Rows of the frame, the preferred first: highest `by` (null and NaN lowest), lowest sample_index, lowest id."""
    best = pl.lit(None, pl.Float64) if by is None else (pl.col(by) + 0).cast(pl.Float64)
    order = frame.select("sample_index", "experience_id", best=best.fill_nan(None), row=pl.int_range(pl.len()))
    keys = ("best", "sample_index", "experience_id")
    return order.sort(*keys, descending=[True, False, False], nulls_last=True)["row"].to_list()


def scopes_of(frame: pl.DataFrame, scope: Sequence[str]) -> list[tuple[Any, ...]]:
    """The values within which each row is compared; one for all without `scope`."""
    return frame.select(scope).rows() if scope else [()] * frame.height
