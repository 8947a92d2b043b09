"""Packing: rows laid end to end in as few micro-batches as first-fit finds, longest first.

Rows of one group repeat their prompt. Where rows of a micro-batch begin with the same untrained tokens, these are laid
out once and every such row continues them: attention makes a token depend on what precedes it only, so the numbers are
the same and the prompt is computed once instead of once per row.

The order depends on ids, lengths and positions only, so the same batch always packs the same way. A row is never split
over micro-batches or shortened.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from buffer_engine.errors import RowTooLongError
from trainers.collate import BatchArrays


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch: r whole rows in s segments, T tokens, N of them trained.

    A segment is a row, or a prompt that several rows share, or what such a row adds to its prompt.

    Attributes:
        rows: index of each row in the batch, int64 [r].
        token_ids: int64 [T].
        position_ids: int64 [T]: the token's position in its row.
        cu_seqlens: int32 [s + 1], where segments begin and end in T.
        prefixes: for each segment, the segment that it continues, or −1, int64 [s].
        trained: positions in T of the trained tokens, int64 [N].
        predictors: positions in T of the tokens before them, int64 [N].
        trained_rows: micro-batch row of each trained token, int64 [N].
        source: index in the batch's flat token arrays of each trained token, int64 [N].
    """

    rows: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]
    position_ids: npt.NDArray[np.int64]
    cu_seqlens: npt.NDArray[np.int32]
    prefixes: npt.NDArray[np.int64]
    trained: npt.NDArray[np.int64]
    predictors: npt.NDArray[np.int64]
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
    share_prompts: bool = False,
) -> list[PackedBatch]:
    """Micro-batches of at most `token_budget` tokens each.

    Args:
        rows: the rows to pack, indices into the batch; None: all.
        padded: count every row of a micro-batch as long as its longest one (what a padded layout costs).
        share_prompts: lay out once what rows of a micro-batch have in common before their first trained token; not
            with `padded`.

    Raises:
        RowTooLongError: a row has more tokens than the budget; nothing is truncated.
    """
    check_lengths(arrays, token_budget)
    chosen = np.arange(len(arrays.weights), dtype=np.int64) if rows is None else rows
    prompts = _prompts(arrays, chosen) if share_prompts and not padded else {}
    lengths = arrays.lengths
    longest: dict[bytes, int] = {}
    for row in chosen.tolist():
        if row in prompts:
            longest[prompts[row]] = max(longest.get(prompts[row], 0), int(lengths[row]))
    # Rows of one prompt stay together, at the place of their longest.
    ordered = sorted(
        chosen.tolist(),
        key=lambda row: (-longest.get(prompts.get(row, b""), int(lengths[row])), prompts.get(row, b""), -lengths[row]),
    )
    bins: list[list[int]] = []
    free = np.empty(len(ordered), dtype=np.int64)
    holders: defaultdict[bytes, list[int]] = defaultdict(list)
    # First-fit is sequential by nature: where a row goes depends on all rows before it. One numpy scan per row.
    for row in ordered:
        length, prompt = int(lengths[row]), prompts.get(row)
        cost = np.full(len(bins), length)
        if padded:
            cost = np.array([lengths[members[0]] for members in bins], dtype=np.int64)
        if prompt is not None:
            cost[holders[prompt]] -= len(prompt) // arrays.token_ids.itemsize
        fits = np.flatnonzero(free[: len(bins)] >= cost)
        target = int(fits[0]) if len(fits) else len(bins)
        if target == len(bins):
            bins.append([])
            free[target] = token_budget - length
        else:
            free[target] -= cost[target]
        bins[target].append(row)
        if prompt is not None and target not in holders[prompt]:
            holders[prompt].append(target)
    return [_lay_out(arrays, members, prompts) for members in bins]


def _prompts(arrays: BatchArrays, rows: npt.NDArray[np.int64]) -> dict[int, bytes]:
    """The bytes of the ids before the first trained token, for rows that share them with another row."""
    trained = np.flatnonzero(arrays.trained)
    padded = np.append(trained, len(arrays.trained))
    firsts = np.minimum(padded[np.searchsorted(trained, arrays.offsets[:-1])], arrays.offsets[1:])
    prompts = {
        row: arrays.token_ids[arrays.offsets[row] : firsts[row]].tobytes()
        for row in rows.tolist()
        if firsts[row] < arrays.offsets[row + 1]
    }
    counts: defaultdict[bytes, int] = defaultdict(int)
    for prompt in prompts.values():
        counts[prompt] += 1
    return {row: prompt for row, prompt in prompts.items() if counts[prompt] > 1 and prompt}


def _lay_out(arrays: BatchArrays, members: list[int], prompts: dict[int, bytes]) -> PackedBatch:
    owners: list[int] = []
    begins: list[int] = []
    lengths: list[int] = []
    prefixes: list[int] = []
    shared: dict[bytes, int] = {}
    # One pass over the rows decides the segments; everything per token below is numpy.
    for local, row in enumerate(members):
        prompt = prompts.get(row)
        start, end = int(arrays.offsets[row]), int(arrays.offsets[row + 1])
        split = 0 if prompt is None else len(prompt) // arrays.token_ids.itemsize
        if prompt is not None and prompt not in shared:
            shared[prompt] = len(owners)
            owners.append(local)
            begins.append(start)
            lengths.append(split)
            prefixes.append(-1)
        owners.append(local)
        begins.append(start + split)
        lengths.append(end - start - split)
        prefixes.append(-1 if prompt is None else shared[prompt])
    rows = np.array(members, dtype=np.int64)
    owner, begin, prefix = (np.array(values, dtype=np.int64) for values in (owners, begins, prefixes))
    ends = np.cumsum(np.array(lengths, dtype=np.int64))
    bounds = np.concatenate([[0], ends])
    segment = np.repeat(np.arange(len(owner), dtype=np.int64), lengths)
    within = np.arange(int(ends[-1]), dtype=np.int64) - bounds[segment]
    source = begin[segment] + within
    trained = np.flatnonzero(arrays.trained[source])
    own = segment[trained]
    continues = (within[trained] == 0) & (prefix[own] >= 0)
    return PackedBatch(
        rows=rows,
        token_ids=arrays.token_ids[source],
        position_ids=source - arrays.offsets[rows][owner[segment]],
        cu_seqlens=bounds.astype(np.int32),
        prefixes=prefix,
        trained=trained,
        predictors=np.where(continues, bounds[prefix[own] + 1] - 1, trained - 1),
        trained_rows=owner[own],
        source=source[trained],
    )
