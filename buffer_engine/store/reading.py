"""Frames for reading: mapped segment files, checksums on first touch, and rows by place.

Payload is never copied on the way to a record batch. A frame is checked once per process before anything decodes it;
a damaged one raises where it is touched and hides no other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, islice
from pathlib import Path

import pyarrow as pa

from buffer_engine.errors import CorruptSegmentError, SchemaError, did_you_mean
from buffer_engine.schema import TABLES, TableSpec
from buffer_engine.store.catalog import Catalog
from buffer_engine.store.cold import ColdReader
from buffer_engine.store.faults import explained
from buffer_engine.store.files import LocalFiles, SegmentFiles
from buffer_engine.store.frames import Frame as Frame  # with the two below, imported from here by others
from buffer_engine.store.frames import frames_by_id as frames_by_id
from buffer_engine.store.frames import frames_of as frames_of
from buffer_engine.store.layout import StoreLayout
from buffer_engine.store.segments import frame_checksum

_DECODED_FRAMES = 4096
_MOVES = 5
_JOINED_BYTES = 256 << 20
_MAPPED_BYTES = 64 << 10
_FETCHED_FRAMES = 128


@dataclass(frozen=True, slots=True)
class _Mapped:
    path: Path
    data: pa.Buffer
    schema: pa.Schema


class SegmentReader:
    """Maps segment files and decodes frames from them; safe to share between threads."""

    def __init__(self, layout: StoreLayout, catalog: Catalog, files: SegmentFiles | None = None) -> None:
        """Read from `files`; None: those in the store's folder."""
        self._layout = layout
        self._catalog = catalog
        self._files = files or LocalFiles(layout)
        self._lock = threading.Lock()
        self._maps: dict[str, _Mapped] = {}
        self._decoded: dict[int, tuple[str, pa.RecordBatch]] = {}
        self._checked: set[tuple[int, str]] = set()
        self._cold = ColdReader(layout, catalog, self._files)

    def batch(self, frame: Frame, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """The rows of a frame with the table's current schema, or these columns of it.

        Zero copy from an Arrow stream. Of a Parquet file only the columns asked for are decoded.

        Raises:
            CorruptSegmentError: the file is gone or shorter than the frame, or the bytes have changed.
        """
        if frame.format == "arrows":
            with suppress(FileNotFoundError, CorruptSegmentError):  # `arrays` looks again, and says what is wrong
                whole = self._hot(frame)
                return whole if columns is None else whole.select(list(columns))
        schema = schema_of(TABLES[frame.table], columns)
        arrays = self.arrays(frame, schema.names)
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def arrays(self, frame: Frame, columns: Sequence[str]) -> list[pa.Array]:
        """These columns of a frame; see `batch`."""
        renewed = False
        for _ in range(_MOVES):
            try:
                if frame.format == "parquet":
                    return self._cold.arrays(frame, columns)
                whole, places = self._hot(frame), _places(frame.table)
                return [whole.column(places[name]) for name in columns]
            except FileNotFoundError as error:
                frame = self._moved(frame, error)
            except CorruptSegmentError:
                if renewed or not self._renewed(frame):
                    raise
                renewed = True  # only the copy on this machine may be bad
        raise CorruptSegmentError(
            f"{_place(self._layout, frame)}: the frame was moved {_MOVES} times while it was read"
        )

    def batches(
        self,
        frames: Iterable[Frame],
        columns: Sequence[str] | None = None,
        *,
        on_damage: Callable[[Frame, CorruptSegmentError], None] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of frames, in their order. Frames that lie side by side in a Parquet file come as one batch.

        Args:
            on_damage: told of each frame that cannot be read, which is then left out; None: it is raised.

        Raises:
            CorruptSegmentError: see `batch`; raised when the iteration reaches the frame.
        """
        for run in self._runs(self.ahead(frames)):
            if len(run) > 1:
                whole = replace(run[0], length=sum(one.length for one in run), rows=sum(one.rows for one in run))
                schema = schema_of(TABLES[whole.table], columns)
                try:
                    yield pa.RecordBatch.from_arrays(self._cold.arrays(whole, schema.names), schema=schema)
                    continue
                except (FileNotFoundError, CorruptSegmentError):
                    pass  # they were moved since they were looked up, each to a place of its own, or one is damaged
            for frame in run:
                try:
                    batch = self.batch(frame, columns)
                except CorruptSegmentError as error:
                    if on_damage is None:
                        raise
                    on_damage(frame, error)
                else:
                    yield batch

    def _runs(self, frames: Iterable[Frame]) -> Iterator[list[Frame]]:
        run: list[Frame] = []
        for frame in frames:
            if run and run[-1].format == frame.format == "parquet" and self._adjoin(run[-1], frame):
                run.append(frame)
                continue
            if run:
                yield run
            run = [frame]
        if run:
            yield run

    def forget_removed(self) -> None:
        """Let go of maps of files that compaction has removed, so that their room on the disk is free."""
        with self._lock:
            self._forget_removed()

    def fetch(self, frames: Iterable[Frame]) -> None:
        """Have the files of these frames here, fetched side by side where they lie elsewhere."""
        if not self._files.in_place:
            with self._lock:
                wanted = [frame.segment for frame in frames if frame.segment not in self._maps]
            self._files.fetch([name for name in wanted if not self._cold.is_open(name)])

    def ahead(self, frames: Iterable[Frame]) -> Iterator[Frame]:
        """The frames, their files fetched ahead of whoever reads them."""
        if self._files.in_place:
            yield from frames
            return
        source = iter(frames)
        while part := list(islice(source, _FETCHED_FRAMES)):
            self.fetch(part)
            yield from part

    def close(self) -> None:
        """Forget maps and batches; what callers still hold stays mapped until they let go."""
        with self._lock:
            self._maps.clear()
            self._decoded.clear()
        self._cold.close()

    def _adjoin(self, one: Frame, other: Frame) -> bool:
        try:
            return self._cold.same_group(one, other)
        except (FileNotFoundError, CorruptSegmentError):
            return False  # each is looked up anew where it is read

    def _moved(self, frame: Frame, error: FileNotFoundError) -> Frame:
        """The frame where it lies now, when compaction has moved it since it was looked up."""
        with self._catalog.fresh() as connection:
            found = frames_by_id(connection, [frame.frame_id]).get(frame.frame_id)
        if found is None or found.segment == frame.segment or not found.same_as(frame):
            raise CorruptSegmentError(
                f"{_place(self._layout, frame)}: the file is missing; restore it from a copy"
            ) from error
        return found

    def _hot(self, frame: Frame) -> pa.RecordBatch:
        known = self._decoded.get(frame.frame_id)  # one look at a dict needs no lock
        if known is not None and known[0] == frame.segment:
            return known[1]
        with self._lock:
            decoded = self._decode(frame)
            if len(self._decoded) >= _DECODED_FRAMES:
                self._decoded.pop(next(iter(self._decoded)))
            self._decoded[frame.frame_id] = (frame.segment, decoded)
            return decoded

    def _decode(self, frame: Frame) -> pa.RecordBatch:
        mapped = self._map(frame)
        data = mapped.data.slice(frame.offset, frame.length)
        if (frame.frame_id, frame.segment) not in self._checked:
            found = frame_checksum(memoryview(data))
            if found != frame.xxh3:
                raise CorruptSegmentError(
                    f"{_place(self._layout, frame)}: the bytes have changed since they were written "
                    f"(XXH3 {found & (2**64 - 1):016x}, expected {frame.xxh3 & (2**64 - 1):016x}); "
                    f"{frame.rows} rows of {frame.table} are damaged, all others stay readable: restore this file "
                    "from a copy"
                )
            self._checked.add((frame.frame_id, frame.segment))
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
        path = self._files.local(frame.segment, at_least=end)
        if self._files.in_place:
            self._forget_removed()
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
        mapped = _Mapped(path, data, schema)
        self._maps[frame.segment] = mapped
        return mapped

    def _forget_removed(self) -> None:
        gone = [name for name, mapped in self._maps.items() if not mapped.path.exists()] + self._cold.removed()
        if gone:
            self._forget(gone)

    def _forget(self, names: Sequence[str]) -> None:
        removed = set(names)
        for name in removed:
            self._maps.pop(name, None)
        for frame_id in [at for at, (name, _) in self._decoded.items() if name in removed]:
            del self._decoded[frame_id]
        self._cold.forget(names)

    def _renewed(self, frame: Frame) -> bool:
        """Whether there is a fresh copy of a frame's file to read instead of the one whose bytes are wrong."""
        try:
            if not self._files.renew(frame.segment):
                return False
        except FileNotFoundError:
            return True  # it was moved, or it is missing: the next look says which
        with self._lock:
            self._forget([frame.segment])
        return True


@cache
def _places(table: str) -> dict[str, int]:
    return {name: at for at, name in enumerate(TABLES[table].schema.names)}


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
    found: dict[int, list[pa.Array]] = {}
    weight: dict[int, int] = {}
    for frame_id, _, _ in runs:
        if frame_id not in found:
            frame = frames[frame_id]
            found[frame_id] = read = reader.arrays(frame, schema.names)
            size = frame.length if frame.format == "arrows" else sum(array.nbytes for array in read)
            weight[frame_id] = size // max(frame.rows, 1)
    # one chunk is what consumers want; beyond this many bytes, 32-bit offsets could overflow
    small = sum(weight[frame_id] * count for frame_id, _, count in runs) < _JOINED_BYTES
    arrays: list[pa.Array | pa.ChunkedArray] = []
    for at in range(len(schema.names)):
        whole = {frame_id: read[at] for frame_id, read in found.items()}
        parts = [whole[frame_id].slice(first, count) for frame_id, first, count in runs]
        arrays.append(parts[0] if len(parts) == 1 else _joined(parts, small=small))
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
