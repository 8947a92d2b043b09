"""to_preference_pairs: better and worse answers to one task, as pairs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

import polars as pl
from pydantic import Field

from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.replies import Reissue, span


class ToPreferencePairsConfig(OperatorConfig):
    """What is better, and which pairs are made."""

    column: str = Field("reward", description="numeric column: the greater is the better answer")
    margin: float = Field(0.0, ge=0, description="the better one must be ahead by more than this")
    strategy: Literal["best_worst", "all"] = Field(
        "best_worst",
        description="best_worst: the best with the worst, the second with the second worst, and so on; all: every two",
    )
    max_pairs: int | None = Field(1, ge=1, description="most pairs of a group, widest margin first; null: all of them")
    originals: Literal["reject", "keep"] = Field(
        "reject",
        description="what becomes of the group itself: rejected (`paired`, `unpaired`), or kept beside the pairs",
    )


class ToPreferencePairs(Operator[ToPreferencePairsConfig]):
    """Makes of every group pairs of a better and a worse row, each pair a new group of two.

    The new rows have the tokens of the old ones as they were sampled; sample_index 0 is the chosen one and 1 the
    rejected one, and `info_json` says `pair`, `margin`, and the value of each. They enter the next pass, which leaves
    them as they are. Rows without a value (null or NaN) are in no pair. Equal values make no pair, whatever the margin.
    Equally good rows come in the order of sample_index and id. With best_worst no row is in two pairs.
    """

    Config = ToPreferencePairsConfig

    def contract(self) -> Contract:
        """Reads the value and the rows; needs whole groups; adds pairs and may reject the rest."""
        reads = frozenset((self.config.column, "sample_index", "messages", "total_tokens", "made_by"))
        return Contract(reads=reads, scope="group", drops=self.config.originals == "reject", adds=True, cost="python")

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Pair every group."""
        reissue = Reissue(frame, "paired", f"pairs by {self.config.column}")
        values = frame.select((pl.col(self.config.column) + 0).cast(pl.Float64).fill_nan(None)).to_series().to_list()
        order = frame.select(
            "group_id", "sample_index", "experience_id", "made_by", row=pl.int_range(pl.len())
        ).filter(pl.col("made_by") != self.config.name).sort("group_id", "sample_index", "experience_id")  # fmt: skip
        # A Python loop over groups: a pair is two rows, chosen among all that are left.
        for _, members in order.group_by("group_id", maintain_order=True):
            rows: list[int] = members["row"].to_list()
            used: set[int] = set()
            for chosen, rejected in self._pairs([row for row in rows if values[row] is not None], values):
                self._add(reissue, chosen, rejected, values)
                used |= {chosen, rejected}
            if self.config.originals == "reject":
                reissue.replace([row for row in rows if row in used])
                reissue.replace([row for row in rows if row not in used], "unpaired")
        return reissue.result()

    def _pairs(self, rows: Sequence[int], values: Sequence[float]) -> list[tuple[int, int]]:
        ranked = sorted(rows, key=lambda row: -values[row])
        if self.config.strategy == "best_worst":
            candidates = [(ranked[place], ranked[-1 - place]) for place in range(len(ranked) // 2)]
        else:
            candidates = [(better, worse) for place, better in enumerate(ranked) for worse in ranked[place + 1 :]]
            candidates.sort(key=lambda pair: values[pair[1]] - values[pair[0]])
        ahead = [pair for pair in candidates if values[pair[0]] - values[pair[1]] > self.config.margin]
        return ahead[: self.config.max_pairs]

    def _add(self, reissue: Reissue, chosen: int, rejected: int, values: Sequence[float]) -> None:
        ids, lengths = reissue.frame["experience_id"], reissue.frame["total_tokens"]
        for sample, (row, side) in enumerate(((chosen, "chosen"), (rejected, "rejected"))):
            info = {"pair": side, "value": values[row], "margin": values[chosen] - values[rejected]}
            reissue.add(
                row,
                spans=[span(row, 0, lengths[row])] if lengths[row] else None,
                messages=reissue.frame["messages"][row],
                bundle=f"{ids[chosen]} over {ids[rejected]}",
                sample=sample,
                info=json.dumps(info),
            )
