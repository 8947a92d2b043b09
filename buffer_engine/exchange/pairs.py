"""Preference pairs out of groups: siblings of one prompt that were rewarded differently."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import combinations, groupby
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from buffer_engine.errors import UsageError

if TYPE_CHECKING:
    from buffer_engine.exchange.relations import Extraction
    from buffer_engine.exchange.shapes import Shape, ShapeReport

PAIR_COLUMNS: dict[str, pa.DataType] = {
    "chosen_id": pa.string(),
    "rejected_id": pa.string(),
    "chosen_reward": pa.float64(),
    "rejected_reward": pa.float64(),
    "run_id": pa.string(),
    "group_id": pa.string(),
    "task_id": pa.string(),
}
"""What can be carried along with a pair."""

_Row = dict[str, Any]


def choose_pairs(extraction: Extraction, condition: str, shape: Shape, report: ShapeReport) -> list[_Row]:
    """Pairs of each group, those with the greatest difference first; only ids, rewards and group are held.

    Of pairs that differ alike the one whose rows arrived first is taken. An episode of several rows (`turn_index` above
    0) has no single text to prefer and is counted.

    Raises:
        UsageError: the margin or the number of pairs is negative.
    """
    if shape.margin < 0 or shape.pairs_per_group < 0:
        raise UsageError("a margin and a number of pairs are 0 or more")
    rows = extraction.inspection.rows(
        "SELECT experience_id, run_id, group_id, task_id, sample_index, turn_index, reward, sequence FROM experiences "
        f"WHERE {condition} ORDER BY run_id, group_id, sequence"
    )
    pairs: list[_Row] = []
    for _, members in groupby(rows, key=lambda row: (row["run_id"], row["group_id"])):
        siblings = list(members)
        several = {row["sample_index"] for row in siblings if row["turn_index"] > 0}
        if several:
            report.count("several_rows_an_episode", len(several))
        rewarded = [row for row in siblings if row["reward"] is not None and row["sample_index"] not in several]
        found = _of_group(rewarded, shape)
        if not found:
            report.count("no_difference")
        pairs += found
    return pairs


def _of_group(rows: Sequence[_Row], shape: Shape) -> list[_Row]:
    if shape.pairs_per_group == 1:  # the common case, without looking at all pairs
        candidates: Iterable[tuple[_Row, _Row]] = (
            [
                (max(rows, key=_reward), min(rows, key=_reward))  # both take the first of equals
            ]
            if rows
            else []
        )
    else:
        candidates = [
            (one, other) if one["reward"] > other["reward"] else (other, one) for one, other in combinations(rows, 2)
        ]
    fitting = [
        (chosen, rejected)
        for chosen, rejected in candidates
        if chosen["reward"] > rejected["reward"] and chosen["reward"] - rejected["reward"] >= shape.margin
    ]
    most = shape.pairs_per_group or len(fitting)
    furthest = heapq.nsmallest(most, fitting, key=lambda pair: (
        pair[1]["reward"] - pair[0]["reward"], pair[0]["sequence"], pair[1]["sequence"],
    ))  # fmt: skip
    return [_pair(chosen, rejected) for chosen, rejected in furthest]


def _reward(row: _Row) -> float:
    return row["reward"]


def _pair(chosen: _Row, rejected: _Row) -> _Row:
    return {
        "chosen_id": chosen["experience_id"], "rejected_id": rejected["experience_id"],
        "chosen_reward": chosen["reward"], "rejected_reward": rejected["reward"],
        "run_id": chosen["run_id"], "group_id": chosen["group_id"], "task_id": chosen["task_id"],
    }  # fmt: skip
