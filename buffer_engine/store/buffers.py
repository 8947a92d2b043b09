"""Arrow buffers as numpy views, without a compute call and without a copy.

A small append is thirty columns of 64 values; one Arrow compute call on each costs more than the work itself. These
read the buffers directly: the physical layout is part of Arrow's specification.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

Int32s = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


def values_of(array: pa.Array) -> npt.NDArray[Any]:
    """Values of an array of integers, floats, timestamps (as int64) or bools (as uint8), whatever lies under a null."""
    data = array.buffers()[1]
    if data is None:
        return np.zeros(0, dtype=_dtype(array.type))
    start, end = array.offset, array.offset + len(array)
    if pt.is_boolean(array.type):
        return _bits(data, start, end)
    return np.frombuffer(data, dtype=_dtype(array.type), count=end)[start:]


def valid_of(array: pa.Array) -> Bytes | None:
    """1 where the array has a value, 0 where it is null; None when nothing is null."""
    if not array.null_count:
        return None
    marks = array.buffers()[0]
    if marks is None:  # an array of type null, or one whose parent says so
        return np.zeros(len(array), dtype=np.uint8)
    return _bits(marks, array.offset, array.offset + len(array))


def offsets_of(array: pa.Array) -> Int32s:
    """Where each text or list of the array begins in its data, and the end; length `len(array) + 1`."""
    offsets = array.buffers()[1]
    if offsets is None or offsets.size == 0:
        return np.zeros(1, dtype=np.int32)
    return np.frombuffer(offsets, dtype=np.int32, count=array.offset + len(array) + 1)[array.offset :]


def text_data(array: pa.Array) -> memoryview:
    """The bytes that `offsets_of` a string array points into."""
    data = array.buffers()[2]
    return memoryview(b"" if data is None else data)


def elements_of(array: pa.Array) -> tuple[pa.Array, Int32s]:
    """Elements of all lists in order, and where each list begins among them; a null list is empty."""
    valid, offsets = valid_of(array), offsets_of(array)
    if valid is None or not np.any(np.diff(offsets)[valid == 0]):
        first = int(offsets[0])
        return array.values.slice(first, int(offsets[-1]) - first), offsets - first if first else offsets
    lengths = np.where(valid == 1, np.diff(offsets), 0)
    return array.flatten(), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def children_of(array: pa.Array) -> list[pa.Array]:
    """Fields of a struct array, null where the struct is."""
    if array.null_count:
        return array.flatten()
    return [array.field(at) for at in range(array.type.num_fields)]


def _bits(data: pa.Buffer, start: int, end: int) -> Bytes:
    first = start // 8
    packed = np.frombuffer(data, dtype=np.uint8, count=(end + 7) // 8)[first:]
    return np.unpackbits(packed, count=end - 8 * first, bitorder="little")[start - 8 * first :]


@cache
def _dtype(kind: pa.DataType) -> np.dtype[Any]:
    return np.dtype(np.int64) if pt.is_timestamp(kind) else np.dtype(kind.to_pandas_dtype())
