"""A 16-byte hash of what a row says, equal for equal content in every process and layout.

A repeated write is recognised by it without reading the stored row. Rows are laid out canonically column-wise with
Arrow and numpy; per row only a handful of byte ranges go through XXH3, so the cost does not grow with Python objects.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
import xxhash

from buffer_engine.schema import TableSpec

Bounds = npt.NDArray[np.int64]
_NULL_FLOAT = float("nan")  # data may not hold NaN, so it can stand for null


@dataclass(slots=True)
class _Level:
    """What one nesting level contributes: bytes of fixed width per element, and texts."""

    fixed: list[npt.NDArray[np.uint8]] = field(default_factory=list[npt.NDArray[np.uint8]])
    texts: list[pa.Array] = field(default_factory=list[pa.Array])
    lists: list[pa.Array] = field(default_factory=list[pa.Array])


def row_hashes(spec: TableSpec, batch: pa.RecordBatch) -> list[bytes]:
    """XXH3-128 of every row's canonical bytes, volatile columns left out.

    Args:
        batch: rows with exactly the schema of `spec`.
    """
    columns = [batch.column(name) for name in spec.schema.names if name not in spec.volatile]
    ranges: list[tuple[memoryview, list[int]]] = []
    _lay_out(columns, np.arange(batch.num_rows + 1, dtype=np.int64), ranges, elements=False)
    digests: list[bytes] = []
    for row in range(batch.num_rows):  # xxhash has no call for many rows at once
        state = xxhash.xxh3_128()
        for data, bounds in ranges:
            state.update(data[bounds[row] : bounds[row + 1]])
        digests.append(state.digest())
    return digests


def _lay_out(
    columns: list[pa.Array], bounds: Bounds, ranges: list[tuple[memoryview, list[int]]], *, elements: bool
) -> None:
    """Add to `ranges` the bytes of `columns` and, per row, where its part begins.

    Args:
        bounds: first element of each row, and the end; length rows + 1.
        elements: the one column holds the elements of lists, where an integer is never null and needs no mark.
    """
    level = _Level()
    for column in columns:
        _sort_in(column, level, marked=not elements)
    if level.fixed:
        block = level.fixed[0] if len(level.fixed) == 1 else np.concatenate(level.fixed, axis=1)
        ranges.append((np.ascontiguousarray(block).reshape(-1).data, (bounds * block.shape[1]).tolist()))
    if level.texts:
        joined = pc.binary_join_element_wise(*level.texts, "", null_handling="replace", null_replacement="")
        _, offsets, data = joined.buffers()
        starts = np.frombuffer(offsets, dtype=np.int32)[joined.offset : joined.offset + len(joined) + 1]
        ranges.append((memoryview(data if data is not None else b""), starts[bounds].tolist()))
    for column in level.lists:
        lengths = _filled(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        offsets_of_lists = np.zeros(len(column) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets_of_lists[1:])
        _lay_out([column.flatten()], offsets_of_lists[bounds], ranges, elements=True)


def _sort_in(column: pa.Array, level: _Level, *, marked: bool) -> None:
    kind = column.type
    if pt.is_struct(kind):
        level.fixed.append(_marks(column))
        for child in column.flatten():
            _sort_in(child, level, marked=True)
    elif pt.is_list(kind):
        level.fixed.append(_bytes_of(_filled(pc.list_value_length(column), -1)))
        level.lists.append(column)
    elif pt.is_string(kind):
        level.fixed.append(_bytes_of(_filled(pc.binary_length(column), -1)))
        level.texts.append(column)
    elif pt.is_boolean(kind):
        level.fixed.append(_bytes_of(_filled(column.cast(pa.uint8()), 2)))
    elif pt.is_floating(kind):
        level.fixed.append(_bytes_of(_filled(column, _NULL_FLOAT)))
    else:
        level.fixed.append(_bytes_of(_filled(column.cast(pa.int64()) if pt.is_timestamp(kind) else column, 0)))
        if marked:  # tells null from 0
            level.fixed.append(_marks(column))


def _filled(array: pa.Array, value: float) -> pa.Array:
    return array.fill_null(value) if array.null_count else array


def _marks(array: pa.Array) -> npt.NDArray[np.uint8]:
    """One byte per element: 1 where it has a value."""
    if not array.null_count:
        return np.ones((len(array), 1), dtype=np.uint8)
    return _bytes_of(array.is_valid().cast(pa.uint8()))


def _bytes_of(array: pa.Array) -> npt.NDArray[np.uint8]:
    values = np.ascontiguousarray(array.to_numpy(zero_copy_only=False))
    return values.view(np.uint8).reshape(len(values), values.dtype.itemsize)
