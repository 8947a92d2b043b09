"""Token columns of chosen rollouts as plain numpy arrays: padded to one width, or packed end to end.

The bytes go straight from the mapped frames into the arrays, one slice copy a row and column: no Arrow table is built
and no element becomes a Python object. A log-probability that is not known stays recognisable: it is NaN (which no
stored row may hold), never 0. Places behind a row's end hold the column's padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from buffer_engine.errors import RowTooLongError, SchemaError, did_you_mean
from buffer_engine.schema import ROLLOUTS
from buffer_engine.store.buffers import Bytes, Int32s, offsets_of, valid_of, values_of
from buffer_engine.store.reading import Frame, SegmentReader

TOKEN_COLUMNS = (ROLLOUTS.length_of, *ROLLOUTS.per_token)
"""Columns of `rollouts` with one element per token, which can be asked for."""

_REMEMBERED_FRAMES = 4096

Place = tuple[int, int]
Values = npt.NDArray[Any]
Chosen = tuple[dict[str, "_View"], int]
"""Columns of a row's frame, and its row there."""


class PadBuffers:
    """Memory for batches, used again: each read into it overwrites the arrays of the one before."""

    def __init__(self) -> None:
        self._flat: dict[str, Values] = {}

    def take(self, name: str, dtype: np.dtype[Any], count: int) -> Values:
        """`count` elements for a column, with whatever they held last; grows when they are more than ever before."""
        held = self._flat.get(name)
        if held is None or len(held) < count or held.dtype != dtype:
            held = self._flat[name] = np.empty(count, dtype=dtype)
        return held[:count]


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """R rows of W places each. Row r has tokens in places 0 … lengths[r] − 1.

    Attributes:
        experience_ids: the rows, in the order asked.
        lengths: tokens of each row, int64 [R].
        columns: by name, C-contiguous [R, W]: `token_ids` int32, behind the end 0; `loss_mask` bool, behind the end
            False; `logprobs` float32 (nats), NaN where nothing was sampled and behind the end.
    """

    experience_ids: tuple[str, ...]
    lengths: npt.NDArray[np.int64]
    columns: Mapping[str, Values]

    def known(self, column: str) -> npt.NDArray[np.bool_]:
        """Where `column` says something, bool [R, W]: a token is there, and its number is not null."""
        values = self.columns[column]
        inside = np.arange(values.shape[1]) < self.lengths[:, None]
        return inside & ~np.isnan(values) if values.dtype.kind == "f" else inside


@dataclass(frozen=True, slots=True)
class PackedRows:
    """R rows of S tokens together, end to end. Row r owns tokens offsets[r] … offsets[r + 1] − 1.

    Attributes:
        experience_ids: the rows, in the order asked.
        offsets: int64 [R + 1].
        columns: by name, [S], with the types of `PaddedBatch`.
    """

    experience_ids: tuple[str, ...]
    offsets: npt.NDArray[np.int64]
    columns: Mapping[str, Values]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row, int64 [R]."""
        return np.diff(self.offsets)


class _Runs(NamedTuple):
    """Bits of a frame's column as runs of equal ones, none of which crosses from one row into the next.

    Attributes:
        of_row: first run of each row, and the end.
        starts: element at which each run starts, and the end of the last.
        on: 1 where the bits of a run are 1.
    """

    of_row: memoryview
    starts: memoryview
    on: memoryview


class _View(NamedTuple):
    """One list column of a frame as its buffers: list r has elements starts[r] … starts[r + 1] − 1.

    Attributes:
        values: the elements; None for a column of bools, which `runs` says.
        runs: for bools what is true, else what is not null; None when nothing is null, or all nulls are NaN anyway.
        absent: rows that are null as a whole.
    """

    starts: memoryview
    values: Values | None
    runs: _Runs | None
    absent: frozenset[int]


class TokenReader:
    """Gathers token columns of one store's rollouts by place; safe to share between threads."""

    def __init__(self, reader: SegmentReader) -> None:
        self._reader = reader
        self._views: dict[int, tuple[pa.RecordBatch, dict[str, _View]]] = {}

    def padded(
        self,
        ids: Sequence[str],
        places: Sequence[Place],
        frames: Mapping[int, Frame],
        columns: Sequence[str],
        *,
        length: int | None,
        out: PadBuffers | None,
    ) -> PaddedBatch:
        """Token columns of rollouts as numpy arrays [rows, width], in the order asked; see `PaddedBatch`.

        Args:
            length: width; None: that of the longest row.
            out: memory to use again; the arrays of the batch read into it before are overwritten.

        Raises:
            StoreError: an id is not stored; names it.
            SchemaError: a column has not one element per token.
            RowTooLongError: a row has more than `length` tokens; nothing is truncated.
        """
        chosen = self._chosen(places, frames)
        lengths = _lengths(chosen)
        longest = max(lengths, default=0)
        width = longest if length is None else length
        if longest > width:
            raise RowTooLongError(
                f"rollout {ids[lengths.index(longest)]!r} has {longest} tokens and length is {width}; nothing is "
                "truncated: give a larger length, or leave such rows out"
            )
        gathered = {name: _gather(ids, chosen, name, lengths, [width] * len(ids), out) for name in columns}
        return PaddedBatch(
            tuple(ids),
            np.array(lengths, dtype=np.int64),
            {name: flat.reshape(len(ids), width) for name, flat in gathered.items()},
        )

    def packed(
        self,
        ids: Sequence[str],
        places: Sequence[Place],
        frames: Mapping[int, Frame],
        columns: Sequence[str],
        *,
        out: PadBuffers | None,
    ) -> PackedRows:
        """Like `padded`, the rows end to end without padding; see `PackedRows`."""
        chosen = self._chosen(places, frames)
        lengths = _lengths(chosen)
        offsets = np.zeros(len(ids) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        gathered = {name: _gather(ids, chosen, name, lengths, lengths, out) for name in columns}
        return PackedRows(tuple(ids), offsets, gathered)

    def _chosen(self, places: Sequence[Place], frames: Mapping[int, Frame]) -> list[Chosen]:
        views = {frame_id: self._frame(frame) for frame_id, frame in frames.items()}
        return [(views[frame_id], row) for frame_id, row in places]

    def _frame(self, frame: Frame) -> dict[str, _View]:
        batch = self._reader.batch(frame)
        known = self._views.get(frame.frame_id)
        if known is not None and known[0] is batch:  # a frame that was read again, from elsewhere, has other buffers
            return known[1]
        views = {name: _view(batch.column(name)) for name in TOKEN_COLUMNS}
        while len(self._views) >= _REMEMBERED_FRAMES:
            self._views.pop(next(iter(self._views)), None)
        self._views[frame.frame_id] = (batch, views)
        return views


def _lengths(chosen: Sequence[Chosen]) -> list[int]:
    lengths: list[int] = []
    for views, row in chosen:
        starts, _, _, absent = views[ROLLOUTS.length_of]
        lengths.append(0 if row in absent else starts[row + 1] - starts[row])
    return lengths


def _gather(
    ids: Sequence[str],
    chosen: Sequence[Chosen],
    name: str,
    lengths: Sequence[int],
    widths: Sequence[int],
    out: PadBuffers | None,
) -> Values:
    """A column's elements end to end, each row followed by padding up to its width."""
    dtype, padding = _LAYOUT[name]
    longest = max(widths, default=0)
    pad, ones = np.full(longest, padding, dtype=dtype), np.ones(longest, dtype=dtype)
    parts: list[Values] = [pad[:0]]
    # slices of each row, then one copy of all of them in C: a flat index would have to be built for every token
    for at, ((views, row), length, width) in enumerate(zip(chosen, lengths, widths, strict=True)):
        starts, values, runs, absent = views[name]
        if row in absent:
            parts.append(pad[:width])
            continue
        start, end = starts[row], starts[row + 1]
        if end - start != length:
            raise _unequal(ids[at], name, end - start, length)
        if runs is None:
            assert values is not None
            parts.append(values[start:end])
        else:
            of_row, begins, on = runs
            begin = start
            for run in range(of_row[row], of_row[row + 1]):
                stop = begins[run + 1]
                if not on[run]:
                    parts.append(pad[: stop - begin])
                else:
                    parts.append(ones[: stop - begin] if values is None else values[begin:stop])
                begin = stop
        if width > length:
            parts.append(pad[: width - length])
    return np.concatenate(parts, out=(out or PadBuffers()).take(name, dtype, sum(widths)))


def _unequal(experience_id: str, name: str, found: int, expected: int) -> SchemaError:
    return SchemaError(
        f"rollouts: experience_id={experience_id!r}: {name} has length {found} and {ROLLOUTS.length_of} has length "
        f"{expected}; both describe the same tokens"
    )


def token_columns(columns: Sequence[str]) -> tuple[str, ...]:
    """`columns`, checked.

    Raises:
        SchemaError: one has not one element per token.
    """
    for name in columns:
        if name not in TOKEN_COLUMNS:
            raise SchemaError(
                f"rollouts: {name!r} is no column with one element per token: {did_you_mean(name, TOKEN_COLUMNS)}"
            )
    return tuple(columns)


def _layout(name: str) -> tuple[np.dtype[Any], float]:
    kind = ROLLOUTS.schema.field(name).type.value_type
    dtype = np.dtype(kind.to_pandas_dtype())
    return dtype, float("nan") if pt.is_floating(kind) else 0


_LAYOUT = {name: _layout(name) for name in TOKEN_COLUMNS}


def _view(column: pa.Array) -> _View:
    elements, offsets = column.values, offsets_of(column)
    absent = frozenset[int]()
    if column.null_count:
        absent = frozenset(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist())
    if pt.is_boolean(elements.type):
        return _View(offsets.data, None, _runs(values_of(elements), offsets), absent)
    values, valid = values_of(elements), valid_of(elements)
    # stored numbers are never NaN, so as many NaN as nulls are the nulls themselves
    if valid is None or (values.dtype.kind == "f" and np.count_nonzero(np.isnan(values)) == elements.null_count):
        return _View(offsets.data, values, None, absent)
    return _View(offsets.data, values, _runs(valid, offsets), absent)


def _runs(bits: Bytes, offsets: Int32s) -> _Runs:
    first, end = int(offsets[0]), int(offsets[-1])
    begins = np.empty(end - first, dtype=np.bool_)
    np.not_equal(bits[first + 1 : end], bits[first : end - 1], out=begins[1:])
    rows = offsets[:-1]
    begins[rows[rows < end] - first] = True
    starts = (np.flatnonzero(begins) + first).astype(np.int32)
    of_row = np.searchsorted(starts, offsets).astype(np.int32)
    return _Runs(of_row.data, np.append(starts, np.int32(end)).data, bits[starts].data)
