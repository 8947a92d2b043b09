"""Frames that compaction moved into Parquet files: read back column by column, and named for other engines.

A row group's column is checked against the catalog when a process first touches it, decoded once, and kept while it is
among the most recently used ones. A read of few columns decodes, and checks, no others.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from buffer_engine.errors import CorruptSegmentError
from buffer_engine.schema import TABLES
from buffer_engine.store.catalog import Catalog, current_version
from buffer_engine.store.connection import Connection
from buffer_engine.store.faults import explained
from buffer_engine.store.files import SegmentFiles
from buffer_engine.store.frames import Frame, frames_of
from buffer_engine.store.layout import StoreLayout
from buffer_engine.store.parquet import Chunk
from buffer_engine.store.segments import frame_checksum

CACHE_BYTES = 256 << 20
"""Decoded columns that a process keeps, in Arrow bytes; one row group is kept even where it is larger."""


@dataclass(frozen=True, slots=True)
class ColdFile:
    """A Parquet file of which every row counts.

    Attributes:
        path: for `read_parquet`; a file may vanish when a later compaction has merged it and its grace is over.
        segment: its name in the catalog.
        first_frame, last_frame: its frames are among these.
    """

    path: Path
    segment: str
    rows: int
    bytes: int
    first_frame: int
    last_frame: int


@dataclass(frozen=True, slots=True)
class ColdFiles:
    """A table at one version: whole Parquet files, and the frames that are in none of them.

    Attributes:
        files: by first frame. Except for rollouts and tasks the files' ranges of frames do not overlap, and no frame
            of `frames` lies within one, so that files and frames in order of their ids are in order of commit.
        frames: in order of commit; read them with `LocalStore.frame_batch`.
    """

    version: int
    files: tuple[ColdFile, ...]
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class _Open:
    path: Path
    data: pa.Buffer
    metadata: pq.FileMetaData
    columns: tuple[str, ...]
    firsts: tuple[int, ...]
    rows: int
    chunks: tuple[Chunk, ...]


class ColdReader:
    """Decodes columns of frames in Parquet files; safe to share between threads."""

    def __init__(
        self, layout: StoreLayout, catalog: Catalog, files: SegmentFiles, *, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._layout = layout
        self._catalog = catalog
        self._files = files
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._checked: set[tuple[str, int]] = set()
        self._kept: OrderedDict[tuple[str, int, str], pa.Array] = OrderedDict()
        self._kept_bytes = 0
        self._cache_bytes = cache_bytes

    def arrays(self, frame: Frame, columns: Sequence[str]) -> list[pa.Array]:
        """These columns of the frame, with the table's current types; one added since it was written is null.

        Raises:
            FileNotFoundError: the file is gone; the frame may lie elsewhere by now.
            CorruptSegmentError: the bytes have changed since they were written.
        """
        file = self._file(frame)
        end = frame.offset + frame.length
        if end > file.rows:
            raise CorruptSegmentError(
                f"{self._place(frame)}: the file has {file.rows} rows; the catalog points to the wrong place: "
                "restore it from a copy"
            )
        groups = range(_group_of(file, frame.offset), _group_of(file, max(end - 1, frame.offset)) + 1)
        found: list[pa.Array] = []
        for name in columns:
            if name not in file.columns:
                found.append(pa.nulls(frame.rows, TABLES[frame.table].schema.field(name).type))
                continue
            parts: list[pa.Array] = []
            for group in groups:
                first = file.firsts[group]
                whole = self._column(frame, file, group, name)
                start = max(frame.offset - first, 0)
                parts.append(whole.slice(start, min(end - first, len(whole)) - start))
            found.append(parts[0] if len(parts) == 1 else pa.concat_arrays(parts))
        return found

    def same_group(self, one: Frame, other: Frame) -> bool:
        """Whether `other` goes on where `one` ends, in the same row group, so that both can be read as one."""
        if one.segment != other.segment or one.offset + one.length != other.offset:
            return False
        file = self._file(one)
        return _group_of(file, one.offset) == _group_of(file, other.offset + other.length - 1)

    def forget(self, segments: Sequence[str]) -> None:
        """Let go of files that are gone."""
        gone = set(segments)
        with self._lock:
            for name in gone & self._open.keys():
                del self._open[name]
            for key in [key for key in self._kept if key[0] in gone]:
                self._kept_bytes -= self._kept.pop(key).nbytes
            self._checked = {key for key in self._checked if key[0] not in gone}

    def is_open(self, segment: str) -> bool:
        """Whether a file is mapped."""
        return segment in self._open

    def removed(self) -> list[str]:
        """Files that are open and no longer there."""
        with self._lock:
            return [name for name, file in self._open.items() if not file.path.exists()]

    def close(self) -> None:
        """Forget files and columns; what callers still hold stays theirs."""
        self.forget(list(self._open))

    def _column(self, frame: Frame, file: _Open, group: int, name: str) -> pa.Array:
        key = (frame.segment, group, name)
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return known
        # outside the lock: two threads may decode the same column, and nobody waits for another's
        decoded = self._decode(frame, file, group, name)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = decoded
                self._kept_bytes += decoded.nbytes
                while self._kept_bytes > self._cache_bytes and len(self._kept) > 1:
                    self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        return decoded

    def _decode(self, frame: Frame, file: _Open, group: int, name: str) -> pa.Array:
        number = group * len(file.columns) + file.columns.index(name)
        chunk = file.chunks[number]
        where = f"{self._place(frame)}: column {name} of row group {group} (bytes {chunk.offset} to "
        where += f"{chunk.offset + chunk.length})"
        if (frame.segment, number) not in self._checked:
            found = frame_checksum(memoryview(file.data.slice(chunk.offset, chunk.length)))
            if found != chunk.xxh3:
                raise CorruptSegmentError(
                    f"{where}: the bytes have changed since they were written (XXH3 {found & (2**64 - 1):016x}, "
                    f"expected {chunk.xxh3 & (2**64 - 1):016x}); this column of {chunk.rows} rows of {frame.table} is "
                    "damaged, all else stays readable: restore this file from a copy"
                )
            self._checked.add((frame.segment, number))
        try:
            reader = pq.ParquetFile(pa.BufferReader(file.data), metadata=file.metadata)
            column = reader.read_row_group(group, columns=[name]).column(0).combine_chunks()
            whole = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
            return whole.cast(TABLES[frame.table].schema.field(name).type)  # the same buffers, lists named as ours
        except (pa.ArrowException, OSError) as error:
            raise CorruptSegmentError(
                f"{where}: the bytes are as written but cannot be decoded ({error}); the catalog points to the wrong "
                "place: restore it from a copy"
            ) from error

    def _file(self, frame: Frame) -> _Open:
        with self._lock:
            known = self._open.get(frame.segment)
        if known is not None:
            return known
        path = self._files.local(frame.segment)
        with explained(path, "map a segment"):
            file = pa.memory_map(str(path), "r")
            data = file.read_buffer(file.size())
        with self._catalog.fresh() as connection:
            chunks = tuple(Chunk(*row) for row in connection.execute(
                "SELECT c.number, c.first, c.rows, c.offset, c.length, c.xxh3 FROM chunks c "
                "JOIN segments s USING (segment_id) WHERE s.name = ? ORDER BY c.number", (frame.segment,),
            ).fetchall())  # fmt: skip
        if not chunks:  # it was taken out of the catalog after the frame was looked up
            raise FileNotFoundError(path)
        tail = data.slice(max(data.size - frame.head, 0))
        if tail.size != frame.head or frame_checksum(memoryview(tail)) != frame.head_xxh3:
            raise CorruptSegmentError(
                f"{self._place(frame)}: the footer at the end of the file has changed since it was written, or the "
                "file was cut; restore the file from a copy"
            )
        metadata = pq.read_metadata(pa.BufferReader(data))
        paths = (metadata.schema.column(leaf).path.split(".", 1)[0] for leaf in range(metadata.num_columns))
        columns = tuple(dict.fromkeys(paths))
        opened = _Open(
            path,
            data,
            metadata,
            columns,
            tuple(chunk.first for chunk in chunks[:: len(columns)]),
            metadata.num_rows,
            chunks,
        )
        with self._lock:
            self._open[frame.segment] = opened
        return opened

    def _place(self, frame: Frame) -> str:
        return f"{self._layout.segment(frame.segment)}: frame at row {frame.offset}, rows {frame.length}"


def _group_of(file: _Open, row: int) -> int:
    return bisect_right(file.firsts, row) - 1


def cold_files(connection: Connection, files: SegmentFiles, table: str, until: int | None) -> ColdFiles:
    """See `LocalStore.cold_files`; `connection` must see one version throughout."""
    now = current_version(connection)
    version = now if until is None else min(until, now)
    whole: dict[str, ColdFile] = {}
    found = connection.execute(
        "SELECT s.name, s.head, sum(f.rows), min(f.frame_id), max(f.frame_id), max(f.version), count(q.frame_id), "
        "(SELECT max(c.first + c.rows) FROM chunks c WHERE c.segment_id = s.segment_id), "
        "(SELECT sum(c.length) FROM chunks c WHERE c.segment_id = s.segment_id) "
        "FROM segments s JOIN frames f ON f.segment_id = s.segment_id "
        "LEFT JOIN quarantine q ON q.frame_id = f.frame_id "
        "WHERE s.tbl = ? AND s.format = 'parquet' GROUP BY s.segment_id, s.name, s.head ORDER BY min(f.frame_id)",
        (table,),
    )
    for name, head, rows, first, last, newest, damaged, in_file, size in found.fetchall():
        if newest > version or rows != in_file or damaged:
            continue
        with suppress(FileNotFoundError):  # then reading one of its frames says so
            whole[name] = ColdFile(files.local(name), name, rows, size + head, first, last)
    rest = tuple(frame for frame in frames_of(connection, table, until=version) if frame.segment not in whole)
    return ColdFiles(version, tuple(whole.values()), rest)
