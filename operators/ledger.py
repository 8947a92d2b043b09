"""The scores of one pass: what was stored, what the operators have written so far, and the reward in between.

A component that an operator of the pass is going to write is hidden until then. Otherwise the second curation of the
same rows would show its operators the leftovers of the first, and give other results.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import polars as pl
import pyarrow as pa

from operators.reward_state import CURRENT_SCHEMA, current_reward, current_scores


@dataclass(frozen=True, slots=True)
class Ledger:
    """Scores as an operator may see them at one moment of a pass.

    Attributes:
        stored: current scores from before the pass.
        written: scores of this pass so far.
        hidden: components that operators of this pass have not written yet.
    """

    stored: pl.DataFrame
    written: pl.DataFrame
    hidden: frozenset[str]

    @classmethod
    def open(cls, scores: pa.Table | pl.DataFrame | None, *, hidden: Collection[str]) -> Ledger:
        """The ledger at the start of a pass."""
        return cls(current_scores(scores), pl.DataFrame(schema=CURRENT_SCHEMA), frozenset(hidden))

    def score(self, name: str, experience_ids: pl.Series, values: pl.Series, weight: float) -> Ledger:
        """The ledger after an operator scored these experiences: each gets a version above the stored one.

        A weight of 0 is written as null: a metric only. Rows the operator left out keep their stored score.
        """
        versions = self.stored.filter(pl.col("name") == name).select("experience_id", "version")
        rows = (
            pl.DataFrame({"experience_id": experience_ids, "value": values})
            .join(versions, on="experience_id", how="left", maintain_order="left")
            .select(
                "experience_id",
                pl.lit(name).alias("name"),
                "value",
                pl.lit(weight if weight != 0 else None, dtype=pl.Float64).alias("weight"),
                (pl.col("version").fill_null(0) + 1).cast(pl.Int32).alias("version"),
            )
        )
        return replace(self, written=pl.concat([self.written, rows]), hidden=self.hidden - {name})

    def current(self) -> pl.DataFrame:
        """What is current now: stored scores that are not hidden, superseded by what was written."""
        seen = self.stored.filter(~pl.col("name").is_in(list(self.hidden)))
        return current_scores(pl.concat([seen, self.written]))

    def rewards(self, experience_ids: pl.Series) -> pl.Series:
        """Current reward of each experience, in their order; null where there is none."""
        return self._look_up(experience_ids, current_reward(self.current()), "reward")

    def values(self, name: str, experience_ids: pl.Series) -> pl.Series:
        """Current value of a component for each experience, in their order; null where there is none."""
        return self._look_up(experience_ids, self.current().filter(pl.col("name") == name), "value").alias(name)

    @staticmethod
    def _look_up(experience_ids: pl.Series, found: pl.DataFrame, column: str) -> pl.Series:
        wanted = experience_ids.alias("experience_id").to_frame()
        return wanted.join(found, on="experience_id", how="left", maintain_order="left")[column]
