"""exact_dedup: rows whose text is already there."""

from __future__ import annotations

from typing import Literal

import polars as pl
from pydantic import Field

from operators.base import Context, Contract, Operator, Result
from operators.dedup.keeping import KeepingConfig
from operators.verdicts import verdicts_of


class ExactDedupConfig(KeepingConfig):
    """What makes two rows equal, and which of them stays."""

    columns: tuple[str, ...] = Field(("prompt", "response"), min_length=1, description="columns that must be equal")
    normalize: tuple[Literal["nfkc", "case", "ws"], ...] = Field(
        ("ws",), description="differences that do not count: nfkc Unicode forms, case letters, ws amount of blanks"
    )


class ExactDedup(Operator[ExactDedupConfig]):
    """Rejects rows that equal another one, with reason `duplicate` and the row that stays as reference.

    Text is compared, not hashes of it. Null equals null. Rows that earlier passes kept win over new ones. Which of
    several new rows stays does not depend on their order: the highest `by` (null is lowest) with keep: best, then the
    lowest sample_index, then the lowest experience_id.
    """

    Config = ExactDedupConfig

    def contract(self) -> Contract:
        """Reads what is compared and what decides who stays; needs the whole frame; rejects."""
        extra = () if self.config.by is None else (self.config.by,)
        reads = frozenset((*self.config.columns, *self.config.scope, *extra, "sample_index"))
        return Contract(reads=reads, scope="frame", drops=True)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Find for every row the one that stays."""
        keys = [f"key_{place}" for place in range(len(self._compared()))]
        best = pl.lit(0.0) if self.config.by is None else (pl.col(self.config.by) + 0).cast(pl.Float64).fill_nan(None)
        new = frame.select(
            "experience_id", *self._key_columns(), best=best, sample_index="sample_index", row=pl.int_range(pl.len())
        )
        order = new.sort(
            "best", "sample_index", "experience_id", descending=[True, False, False], nulls_last=[True, True, True]
        )
        keepers = order.unique(keys, keep="first", maintain_order=True).select(*keys, keeper="experience_id")
        matched = new.join(keepers, on=keys, how="left", nulls_equal=True)
        if self.config.history:
            matched = matched.join(self._history(context, keys), on=keys, how="left", nulls_equal=True)
            matched = matched.with_columns(keeper=pl.coalesce("old", "keeper"))
        matched = matched.sort("row")
        duplicate = pl.col("keeper") != pl.col("experience_id")
        return Result(
            verdicts=verdicts_of(
                matched,
                "reject",
                pl.when(duplicate).then(pl.lit("duplicate")),
                detail=pl.lit(f"same {', '.join(self.config.columns)}"),
                ref_id=pl.col("keeper"),
            )
        )

    def _compared(self) -> tuple[str, ...]:
        return (*self.config.columns, *self.config.scope)

    def _key_columns(self) -> list[pl.Expr]:
        return [
            (self._normalized(pl.col(name)) if name in self.config.columns else pl.col(name).cast(pl.String)).alias(
                f"key_{place}"
            )
            for place, name in enumerate(self._compared())
        ]

    def _normalized(self, column: pl.Expr) -> pl.Expr:
        text = column.cast(pl.String)
        for form in self.config.normalize:
            if form == "nfkc":
                text = text.str.normalize("NFKC")
            elif form == "case":
                text = text.str.to_lowercase()
            else:
                text = text.str.replace_all(r"\s+", " ").str.strip_chars()
        return text

    def _history(self, context: Context, keys: list[str]) -> pl.DataFrame:
        past = context.history(list(dict.fromkeys(self._compared())))
        return (
            past.select("experience_id", *self._key_columns())
            .sort("experience_id")
            .unique(keys, keep="first", maintain_order=True)
            .select(*keys, old="experience_id")
        )
