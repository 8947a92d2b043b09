"""A few rows for each thing a dry run counted, with enough text to recognise them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from buffer_engine.schema import SCORES, TASKS
from buffer_engine.store.base import ExperienceStore
from operators.frame import build_frame

EXCERPT = 72
"""Characters of a text that an example shows."""


@dataclass(frozen=True, slots=True)
class Change:
    """A value that an operator replaced."""

    experience_id: str
    operator: str
    column: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Examples:
    """Rows to look at.

    Attributes:
        fates: one line per operator, verdict and reason, most rows first: operator, verdict, reason, rows, examples
            (a list of experience_id, text, detail: the number and its limit).
        changes: operator, column, experience_id, before, after, as excerpts around the first difference.
    """

    fates: Sequence[dict[str, Any]]
    changes: Sequence[dict[str, str]]

    @classmethod
    def of(cls, store: ExperienceStore, decisions: pl.DataFrame, changes: Sequence[Change], *, most: int) -> Examples:
        """The first `most` rows of every reason; their texts are read from the store.

        Args:
            decisions: experience_id, operator, verdict, reason, detail of all that is not kept.
        """
        reasons = (
            decisions.group_by("operator", "verdict", "reason", maintain_order=True)
            .agg(rows=pl.len(), ids=pl.col("experience_id").head(most), details=pl.col("detail").head(most))
            .sort("rows", descending=True, maintain_order=True)
            .to_dicts()
        )
        texts = excerpts(store, [row_id for line in reasons for row_id in line["ids"]])
        fates = [
            {name: line[name] for name in ("operator", "verdict", "reason", "rows")}
            | {
                "examples": [
                    {"experience_id": row_id, "text": texts[row_id], "detail": detail}
                    for row_id, detail in zip(line["ids"], line["details"], strict=True)
                ]
            }
            for line in reasons
        ]
        return cls(fates, [_shown(change) for change in changes])


def excerpts(store: ExperienceStore, ids: Sequence[str]) -> dict[str, str]:
    """The beginning of the last reply of each row."""
    if not ids:
        return {}
    rollouts = store.fetch(list(dict.fromkeys(ids)), columns=["experience_id", "task_id", "group_id", "messages"])
    frame = build_frame(
        rollouts, TASKS.schema.empty_table(), SCORES.schema.empty_table(), columns={"response"}, info_columns={}
    )
    return {row_id: shortened(text) for row_id, text in frame.select("experience_id", "response").iter_rows()}


def shortened(text: str, *, start: int = 0) -> str:
    """One line of at most `EXCERPT` characters from `start` on; an ellipsis says where something is missing."""
    part = text[start : start + EXCERPT]
    line = "⏎".join(part.splitlines())
    return ("…" if start else "") + line + ("…" if start + EXCERPT < len(text) else "")


def _shown(change: Change) -> dict[str, str]:
    before, after = _text(change.before), _text(change.after)
    same = next((at for at, (one, two) in enumerate(zip(before, after, strict=False)) if one != two), 0)
    start = max(same - EXCERPT // 3, 0)
    return {
        "operator": change.operator,
        "column": change.column,
        "experience_id": change.experience_id,
        "before": shortened(before, start=start),
        "after": shortened(after, start=start),
    }


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    plain = value.to_list() if isinstance(value, pl.Series) else value
    return json.dumps(plain, ensure_ascii=False, default=str)
