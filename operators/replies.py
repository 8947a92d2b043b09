"""Where the replies of a row lie among its tokens, and rows that are given out again with other spans of them.

A group must stay whole: when one of its rows is replaced, all of them come again in a new group, the others as they
are. So a baseline never compares rows from before with rows from after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import polars as pl

from operators.base import ADDED_SCHEMA, Result
from operators.verdicts import verdicts_of

Span = dict[str, Any]


def stretches(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """[start, stop) of every unbroken run of true: one a reply, for a prompt or a tool's answer lies between two."""
    found: list[tuple[int, int]] = []
    place = 0
    for trained, run in groupby(mask):
        length = sum(1 for _ in run)
        if trained:
            found.append((place, place + length))
        place += length
    return found


def span(row: int, start: int, stop: int, *, trained: bool = True) -> Span:
    """Tokens [start, stop) of a row of the frame; they train where they did, if `trained` is true."""
    return {"row": row, "start": start, "stop": stop, "trained": trained}


@dataclass(slots=True)
class Reissue:
    """New rows in the making, and the old ones they replace.

    Attributes:
        frame: the rows an operator was shown; with messages and total_tokens.
        reason: why the old ones go.
    """

    frame: pl.DataFrame
    reason: str
    detail: str
    added: list[dict[str, Any]] = field(default_factory=list)
    gone: dict[int, str] = field(default_factory=dict)

    def add(
        self,
        parent: int,
        *,
        spans: list[Span] | None,
        messages: Sequence[Any],
        bundle: str,
        sample: int,
        turn: int = 0,
        group_size: int | None = None,
        context_replies: int | None = None,
        info: str | None = None,
    ) -> None:
        """One more new row; `spans` None or of no tokens: its messages are encoded."""
        self.added.append(
            {
                "parent": parent, "messages": list(messages), "spans": spans or None,
                "context_replies": context_replies, "bundle": bundle, "sample_index": sample, "turn_index": turn,
                "group_size": group_size, "info_json": info,
            }
        )  # fmt: skip

    def again(self, row: int, *, bundle: str, sample: int, turn: int, group_size: int | None) -> None:
        """The row as it is, in its new group."""
        length = self.frame["total_tokens"][row]
        self.add(
            row,
            spans=[span(row, 0, length)] if length else None,
            messages=self.frame["messages"][row],
            bundle=bundle,
            sample=sample,
            turn=turn,
            group_size=group_size,
        )

    def replace(self, rows: Sequence[int], reason: str | None = None) -> None:
        """Take these rows out."""
        self.gone |= dict.fromkeys(rows, reason or self.reason)

    def result(self) -> Result:
        """Verdicts on what is gone, and the new rows."""
        reasons = pl.Series("reason", [self.gone.get(row) for row in range(self.frame.height)], pl.String)
        schema = {
            "parent": pl.UInt32(),
            "messages": self.frame.schema["messages"],
            **ADDED_SCHEMA,
        }
        return Result(
            verdicts=verdicts_of(reasons.to_frame(), "reject", pl.col("reason"), detail=pl.lit(self.detail)),
            added=pl.DataFrame(self.added, schema=schema, orient="row") if self.added else pl.DataFrame(schema=schema),
        )


def episodes(frame: pl.DataFrame) -> list[list[list[int]]]:
    """Rows by group, then by episode (sample and attempt), then by turn; groups and episodes in order of their keys."""
    order = frame.select(
        "group_id", "sample_index", "attempt", "turn_index", "experience_id", row=pl.int_range(pl.len())
    ).sort("group_id", "sample_index", "attempt", "turn_index", "experience_id")
    groups: list[list[list[int]]] = []
    for _, members in order.group_by("group_id", maintain_order=True):
        parts = members.group_by("sample_index", "attempt", maintain_order=True).agg("row")
        groups.append(parts["row"].to_list())
    return groups


def size_of(frame: pl.DataFrame, group: Sequence[Sequence[int]]) -> int:
    """Samples of a group when complete: what its rows say, or more if there are more."""
    return max(int(frame["group_size"][group[0][0]]), len(group))
