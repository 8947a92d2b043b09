"""Two pipelines over the same rows: which rows they treat differently, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from buffer_engine.store.base import ExperienceStore
from pipelines.rehearsal.examples import excerpts
from pipelines.rehearsal.passes import Rehearsal


@dataclass(frozen=True, slots=True)
class Difference:
    """What two pipelines do differently.

    Attributes:
        rows: one line per row with another fate: experience_id, group_id, first, second (the fates in words),
            first_detail, second_detail (the number and its limit; null: none).
        fates: one line per pair of fates that differ, most rows first: first, second, rows, and examples (a list of
            experience_id, text, first_detail, second_detail).
        same: rows with the same fate in both.
        other_rewards: rows that both keep, with another reward.
    """

    rows: pl.DataFrame
    fates: Sequence[dict[str, Any]]
    same: int
    other_rewards: int


def compare(store: ExperienceStore, first: Rehearsal, second: Rehearsal, *, examples: int = 3) -> Difference:
    """The difference between two rehearsals of the same rows.

    Args:
        examples: rows to keep per pair of fates.
    """
    columns = ["experience_id", "fate", "detail", "verdict", "reward_after"]
    both = (
        first.rows.with_columns(fate=_fate())
        .select("group_id", *columns)
        .join(second.rows.with_columns(fate=_fate()).select(columns), on="experience_id", suffix="_second")
    )
    differs = pl.col("fate") != pl.col("fate_second")
    rows = both.filter(differs).select(
        "experience_id",
        "group_id",
        first="fate",
        second="fate_second",
        first_detail="detail",
        second_detail="detail_second",
    )
    kept = both.filter((pl.col("verdict") == "keep") & (pl.col("verdict_second") == "keep"))
    moved = kept.filter(pl.col("reward_after").ne_missing(pl.col("reward_after_second")))
    pairs = (
        rows.group_by("first", "second", maintain_order=True)
        .agg(
            rows=pl.len(),
            ids=pl.col("experience_id").head(examples),
            first_detail=pl.col("first_detail").head(examples),
            second_detail=pl.col("second_detail").head(examples),
        )
        .sort("rows", descending=True, maintain_order=True)
        .to_dicts()
    )
    texts = excerpts(store, [row_id for pair in pairs for row_id in pair["ids"]])
    fates = [
        {name: pair[name] for name in ("first", "second", "rows")}
        | {
            "examples": [
                {"experience_id": row_id, "text": texts[row_id], "first_detail": one, "second_detail": two}
                for row_id, one, two in zip(pair["ids"], pair["first_detail"], pair["second_detail"], strict=True)
            ]
        }
        for pair in pairs
    ]
    return Difference(rows, fates, both.height - rows.height, moved.height)


def _fate() -> pl.Expr:
    """The last verdict in words: `kept`, `kept, masked`, `reject by OPERATOR: REASON`."""
    gone = pl.format("{} by {}: {}", "verdict", "operator", "reason")
    kept = pl.when("masked").then(pl.lit("kept, masked")).otherwise(pl.lit("kept"))
    return pl.when(pl.col("verdict") == "keep").then(kept).otherwise(gone)
