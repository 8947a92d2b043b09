"""Packing: rows laid end to end in as few micro-batches as first-fit finds, longest first.

The order depends on lengths and positions only, so the same batch always packs the same way. A row is never split or
shortened.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from buffer_engine.errors import RowTooLongError
from trainers.collate import BatchArrays


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch: r whole rows, T tokens, N of them trained.

    Attributes:
        rows: index of each row in the batch, int64 [r], longest first.
        token_ids: int64 [T].
        position_ids: int64 [T], restarting at 0 with each row.
        cu_seqlens: int32 [r + 1], where rows begin and end in T.
        trained: positions in T of the trained tokens, int64 [N]; each is predicted from the position before it.
        trained_rows: micro-batch row of each trained token, int64 [N].
        source: index in the batch's flat token arrays of each trained token, int64 [N].
    """

    rows: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]
    position_ids: npt.NDArray[np.int64]
    cu_seqlens: npt.NDArray[np.int32]
    trained: npt.NDArray[np.int64]
    trained_rows: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]


def check_lengths(arrays: BatchArrays, token_budget: int) -> None:
    """Raise RowTooLongError for the first row with more than `token_budget` tokens."""
    long = np.flatnonzero(arrays.lengths > token_budget)
    if len(long):
        row = int(long[0])
        raise RowTooLongError(
            f"{arrays.name(row)} has {arrays.lengths[row]} tokens and token_budget is {token_budget} "
            f"({len(long)} such rows in the batch): raise token_budget, or drop long rows with a length_filter"
        )


def pack(
    arrays: BatchArrays,
    *,
    token_budget: int,
    rows: npt.NDArray[np.int64] | None = None,
    padded: bool = False,
) -> list[PackedBatch]:
    """Micro-batches of at most `token_budget` tokens each.

    Args:
        rows: the rows to pack, indices into the batch; None: all.
        padded: count every row of a micro-batch as long as its longest one (what a padded layout costs).

    Raises:
        RowTooLongError: a row has more tokens than the budget; nothing is truncated.
    """
    check_lengths(arrays, token_budget)
    chosen = np.arange(len(arrays.weights), dtype=np.int64) if rows is None else rows
    lengths = arrays.lengths[chosen]
    ordered = chosen[np.argsort(-lengths, kind="stable")]
    bins: list[list[int]] = []
    free = np.empty(len(ordered), dtype=np.int64)
    # First-fit is sequential by nature: where a row goes depends on all rows before it. One numpy scan per row.
    for row in ordered:
        length = int(arrays.lengths[row])
        cost = np.full(len(bins), length)
        if padded:
            cost = np.array([arrays.lengths[members[0]] for members in bins], dtype=np.int64)
        fits = np.flatnonzero(free[: len(bins)] >= cost)
        if len(fits):
            target = int(fits[0])
            bins[target].append(int(row))
            free[target] -= cost[target]
        else:
            free[len(bins)] = token_budget - length
            bins.append([int(row)])
    return [_lay_out(arrays, np.array(members, dtype=np.int64)) for members in bins]


def _lay_out(arrays: BatchArrays, rows: npt.NDArray[np.int64]) -> PackedBatch:
    lengths = arrays.lengths[rows]
    ends = np.cumsum(lengths)
    starts = ends - lengths
    total = int(ends[-1])
    local_rows = np.repeat(np.arange(len(rows), dtype=np.int64), lengths)
    positions = np.arange(total, dtype=np.int64) - starts[local_rows]
    source = arrays.offsets[rows][local_rows] + positions
    trained = np.flatnonzero(arrays.trained[source])
    return PackedBatch(
        rows=rows,
        token_ids=arrays.token_ids[source],
        position_ids=positions,
        cu_seqlens=np.concatenate([[0], ends]).astype(np.int32),
        trained=trained,
        trained_rows=local_rows[trained],
        source=source[trained],
    )
