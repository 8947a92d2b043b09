"""Frames for reading: mapped segment files, checksums on first touch, and rows by place.

Payload is never copied on the way to a record batch. A frame is checked once per process before anything decodes it;
a damaged one raises where it is touched and hides no other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

import pyarrow as pa

from buffer_engine.errors import CorruptSegmentError, SchemaError, did_you_mean
from buffer_engine.schema import TABLES, TableSpec
from buffer_engine.store.connection import Connection
from buffer_engine.store.faults import explained
from buffer_engine.store.files import LocalFiles, SegmentFiles
from buffer_engine.store.layout import StoreLayout
from buffer_engine.store.segments import frame_checksum

_DECODED_FRAMES = 4096
_JOINED_BYTES = 256 << 20
_MAPPED_BYTES = 64 << 10
_FETCHED_FRAMES = 128
FRAME_COLUMNS = "f.frame_id, f.tbl, s.name, f.offset, f.length, f.rows, f.version, f.xxh3, s.head, s.head_xxh3"


@dataclass(frozen=True, slots=True)
class Frame:
    """One committed record batch: where it lies and what its bytes, and those of its file's schema, must hash to."""

    frame_id: int
    table: str
    segment: str
    offset: int
    length: int
    rows: int
    version: int
    xxh3: int
    head: int
    head_xxh3: int


@dataclass(frozen=True, slots=True)
class _Mapped:
    data: pa.Buffer
    schema: pa.Schema


def frames_of(connection: Connection, table: str, *, after: int = 0, until: int | None = None) -> Iterator[Frame]:
    """A table's frames committed at versions in (after, until], in commit order."""
    found = connection.execute(
        f"SELECT {FRAME_COLUMNS} FROM frames f JOIN segments s USING (segment_id) "
        "WHERE f.tbl = ? AND f.version > ? AND f.version <= ? ORDER BY f.frame_id",
        (table, after, 2**62 if until is None else until),
    ).fetchall()
    return (Frame(*row) for row in found)


def frames_by_id(connection: Connection, frame_ids: Iterable[int]) -> dict[int, Frame]:
    """Frames by their ids."""
    wanted = "[" + ",".join(str(frame_id) for frame_id in set(frame_ids)) + "]"
    found = connection.execute(
        f"SELECT {FRAME_COLUMNS} FROM frames f JOIN segments s USING (segment_id) "
        "WHERE f.frame_id IN (SELECT value FROM json_each(?))",
        (wanted,),
    )
    return {row[0]: Frame(*row) for row in found}


class SegmentReader:
    """Maps segment files and decodes frames from them; safe to share between threads."""

    def __init__(self, layout: StoreLayout, files: SegmentFiles | None = None) -> None:
        """Read from `files`; None: those in the store's folder."""
        self._layout = layout
        self._files = files or LocalFiles(layout)
        self._lock = threading.Lock()
        self._maps: dict[str, _Mapped] = {}
        self._decoded: dict[int, pa.RecordBatch] = {}
        self._checked: set[int] = set()

    def batch(self, frame: Frame) -> pa.RecordBatch:
        """The rows of a frame with the table's current schema, zero copy.

        Raises:
            CorruptSegmentError: the file is gone or shorter than the frame, or the bytes have changed.
        """
        with self._lock:
            known = self._decoded.get(frame.frame_id)
            if known is not None:
                return known
            decoded = self._decode(frame)
            if len(self._decoded) >= _DECODED_FRAMES:
                self._decoded.pop(next(iter(self._decoded)))
            self._decoded[frame.frame_id] = decoded
            return decoded

    def batches(self, frames: Iterable[Frame]) -> Iterator[pa.RecordBatch]:
        """`batch` of each, with files that lie elsewhere fetched ahead side by side."""
        source = iter(frames)
        while part := list(islice(source, _FETCHED_FRAMES)):
            self.fetch(part)
            yield from (self.batch(frame) for frame in part)

    def fetch(self, frames: Sequence[Frame]) -> None:
        """Have the files of these frames here."""
        if len(frames) > 1:
            with self._lock:
                unmapped = [frame.segment for frame in frames if frame.segment not in self._maps]
            self._files.fetch(unmapped)

    def close(self) -> None:
        """Forget maps and batches; what callers still hold stays mapped until they let go."""
        with self._lock:
            self._maps.clear()
            self._decoded.clear()

    def _decode(self, frame: Frame) -> pa.RecordBatch:
        mapped = self._map(frame)
        data = mapped.data.slice(frame.offset, frame.length)
        if frame.frame_id not in self._checked:
            found = frame_checksum(memoryview(data))
            if found != frame.xxh3 and self._files.renew(frame.segment):  # only the copy on this machine may be bad
                del self._maps[frame.segment]
                mapped = self._map(frame)
                data = mapped.data.slice(frame.offset, frame.length)
                found = frame_checksum(memoryview(data))
            if found != frame.xxh3:
                raise CorruptSegmentError(
                    f"{_place(self._layout, frame)}: the bytes have changed since they were written "
                    f"(XXH3 {found & (2**64 - 1):016x}, expected {frame.xxh3 & (2**64 - 1):016x}); "
                    f"{frame.rows} rows of {frame.table} are damaged, all others stay readable: restore this file "
                    "from a copy"
                )
            self._checked.add(frame.frame_id)
        try:
            return present(pa.ipc.read_record_batch(data, mapped.schema), TABLES[frame.table])
        except (pa.ArrowInvalid, OSError) as error:
            raise CorruptSegmentError(
                f"{_place(self._layout, frame)}: the bytes are as written but not a record batch of {frame.table} "
                f"({error}); the catalog points to the wrong place: restore it from a copy"
            ) from error

    def _map(self, frame: Frame) -> _Mapped:
        end = frame.offset + frame.length
        mapped = self._maps.get(frame.segment)
        if mapped is not None and mapped.data.size >= end:
            return mapped
        try:
            path = self._files.local(frame.segment, at_least=end)
        except FileNotFoundError as error:
            raise CorruptSegmentError(
                f"{_place(self._layout, frame)}: the file is missing; restore it from a copy"
            ) from error
        if path.stat().st_size < end:
            raise CorruptSegmentError(
                f"{_place(self._layout, frame)}: the file has {path.stat().st_size} bytes and the frame ends at {end}; "
                "restore it from a copy"
            )
        with explained(path, "map a segment"):
            data = _bytes_of(path)
        head = data.slice(0, frame.head)
        if frame_checksum(memoryview(head)) != frame.head_xxh3:
            raise CorruptSegmentError(
                f"{_place(self._layout, frame)}: the schema at the start of the file has changed since it was "
                "written; restore the file from a copy"
            )
        schema = pa.ipc.read_schema(head)
        if schema.equals(TABLES[frame.table].schema, check_metadata=True):
            schema = TABLES[frame.table].schema
        mapped = _Mapped(data, schema)
        self._maps[frame.segment] = mapped
        return mapped


def _bytes_of(path: Path) -> pa.Buffer:
    # a process may have some 65,000 maps, and a store more small objects than that
    if path.stat().st_size < _MAPPED_BYTES:
        return pa.py_buffer(path.read_bytes())
    file = pa.memory_map(str(path), "r")
    return file.read_buffer(file.size())


def _place(layout: StoreLayout, frame: Frame) -> str:
    return f"{layout.segment(frame.segment)}: frame at offset {frame.offset}, length {frame.length}"


def present(batch: pa.RecordBatch, spec: TableSpec) -> pa.RecordBatch:
    """A batch with the table's current schema: a column added since it was written is null."""
    if batch.schema is spec.schema or batch.schema.equals(spec.schema, check_metadata=True):
        return batch
    columns = [
        batch.column(field.name) if field.name in batch.schema.names else pa.nulls(batch.num_rows, field.type)
        for field in spec.schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=spec.schema)


def wanted_columns(spec: TableSpec, columns: Sequence[str] | None) -> list[str] | None:
    """`columns` as a list, checked.

    Raises:
        SchemaError: the table has no such column.
    """
    if columns is None:
        return None
    for name in columns:
        if name not in spec.schema.names:
            raise SchemaError(f"{spec.name}: unknown column {name!r}: {did_you_mean(name, spec.schema.names)}")
    return list(columns)


def schema_of(spec: TableSpec, columns: Sequence[str] | None) -> pa.Schema:
    """The schema that a read of `columns` has."""
    if columns is None:
        return spec.schema
    return pa.schema([spec.schema.field(name) for name in columns], metadata=spec.schema.metadata)


def rows_at(
    reader: SegmentReader,
    frames: dict[int, Frame],
    places: Sequence[tuple[int, int]],
    spec: TableSpec,
    columns: Sequence[str] | None,
) -> pa.Table:
    """Rows by (frame id, row in frame), in the order asked; runs of neighbours are one slice."""
    schema = schema_of(spec, columns)
    runs = list(_runs(places))
    if not runs:
        return schema.empty_table()
    reader.fetch([frames[frame_id] for frame_id in dict.fromkeys(run[0] for run in runs)])
    found = {frame_id: reader.batch(frames[frame_id]) for frame_id, _, _ in runs}
    # one chunk is what consumers want; beyond this many bytes, 32-bit offsets could overflow
    total = sum(frames[frame_id].length // max(frames[frame_id].rows, 1) * count for frame_id, _, count in runs)
    arrays: list[pa.Array | pa.ChunkedArray] = []
    for at, name in enumerate(schema.names):
        place = at if columns is None else spec.schema.get_field_index(name)
        whole = {frame_id: batch.column(place) for frame_id, batch in found.items()}
        parts = [whole[frame_id].slice(first, count) for frame_id, first, count in runs]
        arrays.append(parts[0] if len(parts) == 1 else _joined(parts, small=total < _JOINED_BYTES))
    return pa.Table.from_arrays(arrays, schema=schema)


def _runs(places: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(frame, first row, count) of each run of neighbours."""
    # consecutive rows of one frame keep `row - position in the request` constant
    for (frame_id, _), run in groupby(enumerate(places), key=lambda item: (item[1][0], item[1][1] - item[0])):
        members = list(run)
        yield frame_id, members[0][1][1], len(members)


def _joined(parts: list[pa.Array], *, small: bool) -> pa.Array | pa.ChunkedArray:
    if small:
        try:
            return pa.concat_arrays(parts)
        except pa.ArrowInvalid:  # few rows that are far longer than the others of their frames: offsets overflow
            pass
    return pa.chunked_array(parts)
