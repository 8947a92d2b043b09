"""A 16-byte hash of what a row says, equal for equal content in every process and layout.

A repeated write is recognised by it without reading the stored row. The hash is XXH3-128 over these bytes, volatile
columns left out, numbers little-endian:

1. a *head* of fixed width, column by column in the order of the schema: a number as it is, an integer followed by a
   byte that is 1 where there is a value; a float NaN where null; a bool one byte, 2 where null; a text or list its
   length as int32, -1 where null; a struct one byte that is 1 where there is a value, then its fields;
2. the texts of the row, one after another;
3. for each list column its elements, laid out in the same manner, except that all heads come first, then column by
   column all texts, and that the integers of a plain list, which are never null, have no byte.

Whole columns are laid out at once from their Arrow buffers. Large payload (tokens, log-probabilities, transcripts)
lies contiguously in them and is hashed where it is; per row only a few byte ranges go through XXH3.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
import xxhash

from buffer_engine.schema import TABLES, TableSpec
from buffer_engine.store.buffers import (
    Bytes,
    Int32s,
    children_of,
    elements_of,
    offsets_of,
    text_data,
    valid_of,
    values_of,
)  # fmt: skip

Bounds = npt.NDArray[np.int64]
Ranges = list[tuple[memoryview, list[int]]]
"""Bytes, and where each row's part of them begins, with the end."""


@dataclass(slots=True)
class _Level:
    """What one nesting level contributes: bytes of fixed width per element, texts, and lists of a deeper level."""

    fixed: list[Bytes] = field(default_factory=list[Bytes])
    texts: list[pa.Array] = field(default_factory=list[pa.Array])
    lists: list[pa.Array] = field(default_factory=list[pa.Array])


def row_hashes(spec: TableSpec, batch: pa.RecordBatch) -> list[bytes]:
    """XXH3-128 of every row's canonical bytes; see the module's description.

    Args:
        batch: rows with exactly the schema of `spec`.
    """
    level = _Level()
    for at in _hashed_columns(spec.name):
        _sort_in(batch.column(at), level, marked=True)
    data, starts = _row_parts(level, batch.num_rows)
    nested: Ranges = []
    for column in level.lists:
        _lay_out(column, np.arange(batch.num_rows + 1, dtype=np.int64), nested)
    rows = pairwise(starts)
    if not nested:
        return [xxhash.xxh3_128_digest(data[start:end]) for start, end in rows]
    digests: list[bytes] = []
    for row, (start, end) in enumerate(rows):  # xxhash has no call for many rows at once
        state = xxhash.xxh3_128(data[start:end])
        for part, bounds in nested:
            state.update(part[bounds[row] : bounds[row + 1]])
        digests.append(state.digest())
    return digests


@cache
def _hashed_columns(table: str) -> tuple[int, ...]:
    spec = TABLES[table]
    return tuple(at for at, column in enumerate(spec.schema.names) if column not in spec.volatile)


def _row_parts(level: _Level, rows: int) -> tuple[memoryview, list[int]]:
    """Head and texts of each row, contiguous."""
    block = _block(level.fixed)
    texts = [_as_binary(column) for column in level.texts if column.null_count < rows]
    if not texts:
        width = block.shape[1]
        return block.reshape(-1).data, list(range(0, (rows + 1) * width, width))
    ends = np.arange(0, (rows + 1) * block.shape[1], block.shape[1], dtype=np.int32)
    heads = pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(block)])
    joined = pc.binary_join_element_wise(heads, *texts, b"", null_handling="replace", null_replacement=b"")
    return text_data(joined), offsets_of(joined).tolist()


def _lay_out(column: pa.Array, bounds: Bounds, ranges: Ranges) -> None:
    """Add the bytes of a list column's elements to `ranges`.

    Args:
        bounds: first list of each row, and the end; length rows + 1.
    """
    elements, offsets = elements_of(column)
    inner: Bounds = offsets[bounds].astype(np.int64)
    if not len(elements):
        return
    level = _Level()
    _sort_in(elements, level, marked=False)
    block = _block(level.fixed)
    ranges.append((block.reshape(-1).data, (inner * block.shape[1]).tolist()))
    for texts in level.texts:
        whole = _without_hidden(texts)
        starts = offsets_of(whole)
        if starts[-1] > starts[0]:  # no bytes at all change no hash
            ranges.append((text_data(whole), starts[inner].tolist()))
    for deeper in level.lists:
        _lay_out(deeper, inner, ranges)


def _sort_in(column: pa.Array, level: _Level, *, marked: bool) -> None:
    kind = column.type
    if pt.is_struct(kind):
        level.fixed.append(_marks(column))
        for child in children_of(column):
            _sort_in(child, level, marked=True)
    elif pt.is_list(kind):
        level.fixed.append(_lengths(column))
        level.lists.append(column)
    elif pt.is_string(kind):
        level.fixed.append(_lengths(column))
        level.texts.append(column)
    elif pt.is_boolean(kind):
        level.fixed.append(_bytes_of(_filled(column, 2)))
    elif pt.is_floating(kind):
        level.fixed.append(_bytes_of(_filled(column, np.nan)))  # data may not hold NaN, so it can stand for null
    else:
        level.fixed.append(_bytes_of(_filled(column, 0)))
        if marked:  # tells null from 0
            level.fixed.append(_marks(column))


def _filled(column: pa.Array, value: float) -> npt.NDArray[np.generic]:
    values, valid = values_of(column), valid_of(column)
    return values if valid is None else np.where(valid.view(np.bool_), values, values.dtype.type(value))


def _lengths(column: pa.Array) -> Bytes:
    offsets = offsets_of(column)
    lengths: Int32s = offsets[1:] - offsets[:-1]
    valid = valid_of(column)
    if valid is not None:
        lengths[valid == 0] = -1
    return _bytes_of(lengths)


def _marks(column: pa.Array) -> Bytes:
    """One byte per element: 1 where it has a value."""
    valid = valid_of(column)
    return (np.ones(len(column), dtype=np.uint8) if valid is None else valid).reshape(-1, 1)


def _without_hidden(texts: pa.Array) -> pa.Array:
    """The texts with nothing under a null; a buffer may hold bytes there."""
    valid = valid_of(texts)
    return texts if valid is None or not np.any(np.diff(offsets_of(texts))[valid == 0]) else texts.fill_null("")


def _as_binary(column: pa.Array) -> pa.Array:
    return pa.Array.from_buffers(pa.binary(), len(column), column.buffers(), column.null_count, column.offset)


def _block(parts: list[Bytes]) -> Bytes:
    return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1))


def _bytes_of(values: npt.NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), values.dtype.itemsize)
