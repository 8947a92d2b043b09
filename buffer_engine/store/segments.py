"""Segment files for writing: per process and table, one Arrow IPC stream that only ever grows.

The schema message comes first and each append adds record-batch messages, so any Arrow reader opens the file. Space
is allocated ahead in zeros, which a stream reader takes as the end and which keeps `fdatasync` from having to record a
new file size each time. Nothing is truncated or rewritten: other processes have these files mapped. After a failed
write the file is left as it is and the next append starts a new one.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import xxhash

from buffer_engine.errors import StoreError
from buffer_engine.schema import TABLES
from buffer_engine.store.base import Durability
from buffer_engine.store.catalog import Catalog
from buffer_engine.store.connection import Connection
from buffer_engine.store.faults import explained
from buffer_engine.store.layout import new_writer_id, segment_name
from buffer_engine.store.writeback import start_writeback

SEGMENT_BYTES = 256 << 20
"""A segment that would grow past this is closed and a new one begun (one frame may be larger)."""

_AHEAD_HEAVY = 256 << 10
_AHEAD_NARROW = 64 << 10
_AHEAD_MOST = 32 << 20
_PIECE = 256 << 10
"""Bytes a write call; given many MiB at once the kernel looks for contiguous memory, which can outlast the copy."""
_EAGER = 4 << 20
"""Bytes after which the disk is asked to begin with what is there of a long frame."""


@dataclass(frozen=True, slots=True)
class FrameRef:
    """Where a record batch lies: written and (after `sync`) durable, but invisible until the catalog lists it."""

    table: str
    segment_id: int
    offset: int
    length: int
    rows: int
    xxh3: int


def frame_checksum(data: memoryview) -> int:
    """XXH3-64 of a frame as the signed integer that SQLite stores."""
    digest = xxhash.xxh3_64_intdigest(data)
    return digest - (1 << 64) if digest >= 1 << 63 else digest


class FrameWriter(Protocol):
    """Writes frames somewhere; `SegmentWriter` into files that grow, `ObjectWriter` into objects."""

    def ensure(self, table: str, *, room: int = 0) -> None:
        """Make ready to write a frame of `table` inside a catalog transaction."""
        ...

    def write(self, table: str, batch: pa.RecordBatch, *, may_roll: bool = True) -> FrameRef:
        """Write one record batch; `may_roll=False` inside a catalog transaction, after `ensure`."""
        ...

    def start_sync(self) -> None:
        """Begin what `sync` will wait for."""
        ...

    def sync(self) -> None:
        """Return when every frame written since the last call is durable."""
        ...

    def listed(self, connection: Connection, frames: Sequence[FrameRef]) -> list[FrameRef]:
        """The frames with segments that the catalog knows, inside the transaction that lists them."""
        ...

    def abandon(self, frames: Sequence[FrameRef]) -> None:
        """Frames whose transaction was rolled back for certain; they will not be listed."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class _Segment:
    """One open segment file of this process."""

    def __init__(self, path: Path, segment_id: int, table: str, *, eager: bool) -> None:
        """`eager`: a sync will follow, so the disk may begin while a long frame is still being written."""
        self._eager = eager
        self.path = path
        self.segment_id = segment_id
        self.offset = 0
        self.synced = 0
        self._allocated = 0
        self._ahead = _AHEAD_HEAVY if table in ("rollouts", "tasks") else _AHEAD_NARROW
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        fcntl.flock(self.fd, fcntl.LOCK_SH)  # falls with the process: by it compaction sees that the file is written

    def write(self, data: memoryview) -> int:
        """Add bytes at the end and return where they start."""
        start, end = self.offset, self.offset + len(data)
        if end > self._allocated:
            # in growing steps: each changes the file's size, which makes the next sync write the file system's log
            ahead = min(max(self._ahead, end), _AHEAD_MOST)
            os.posix_fallocate(self.fd, self._allocated, end + ahead - self._allocated)
            self._allocated = end + ahead
        written = begun = 0
        while written < len(data):
            written += os.pwrite(self.fd, data[written : written + _PIECE], start + written)
            if self._eager and written - begun >= _EAGER:
                start_writeback(self.fd, start + begun, written - begun)
                begun = written
        self.offset = end
        return start


class SegmentWriter:
    """The segment files that this process writes, one per table."""

    def __init__(self, catalog: Catalog, *, durability: Durability, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._catalog = catalog
        self._layout = catalog.layout
        self._power = durability == "power"
        self._segment_bytes = segment_bytes
        self._writer_id = new_writer_id()
        self._count = 0
        self._open: dict[str, _Segment] = {}
        self._dirty: set[str] = set()

    def ensure(self, table: str, *, room: int = 0) -> None:
        """Have a segment of `table` open with room for `room` more bytes, beginning a new file when needed.

        The catalog learns the name before the file exists, so a process killed in between leaves no unknown file.
        """
        segment = self._open.get(table)
        if segment is not None and segment.offset + room <= self._segment_bytes:
            return
        if segment is not None:
            self._sync_one(table)
            self._leave(table)
        self._count += 1
        name = segment_name(table, self._writer_id, self._count)
        head = memoryview(TABLES[table].schema.serialize())
        with self._catalog.transaction(f"begin a segment of {table}") as connection:
            ((segment_id,),) = connection.execute(
                "INSERT INTO segments (tbl, name, writer, head, head_xxh3) VALUES (?, ?, ?, ?, ?) RETURNING segment_id",
                (table, name, self._writer_id, len(head), frame_checksum(head)),
            ).fetchall()
        path = self._layout.segment(name)
        with explained(path, "begin a segment"):
            made = not path.parent.exists()
            path.parent.mkdir(parents=True, exist_ok=True)
            segment = _Segment(path, segment_id, table, eager=self._power)
            self._open[table] = segment
            try:
                segment.write(head)
                if self._power:
                    _sync_folder(path.parent)
                    if made:
                        _sync_folder(self._layout.segments)
                        _sync_folder(self._layout.root)
            except OSError:
                self._leave(table)
                raise

    def write(self, table: str, batch: pa.RecordBatch, *, may_roll: bool = True) -> FrameRef:
        """Append one record batch; `may_roll=False` inside a catalog transaction, after `ensure`.

        Raises:
            StoreError: the disk is full or failing; the segment is left and the next write begins a new one.
        """
        data = memoryview(batch.serialize())
        if may_roll:
            self.ensure(table, room=len(data))
        segment = self._open.get(table)
        if segment is None:
            raise StoreError(f"{self._layout.root}: no segment of {table} is open; repeat the write")
        self._dirty.add(table)
        try:
            with explained(segment.path, f"write {batch.num_rows} rows of {table}"):
                offset = segment.write(data)
        except StoreError:
            self._leave(table)
            raise
        return FrameRef(table, segment.segment_id, offset, len(data), batch.num_rows, frame_checksum(data))

    def start_sync(self) -> None:
        """Have the disk begin with the frames written since the last `sync`, which will then wait less."""
        if self._power:
            for table in self._dirty:
                segment = self._open[table]
                start_writeback(segment.fd, segment.synced, segment.offset - segment.synced)

    def sync(self) -> None:
        """Make every frame written since the last call durable against loss of power (durability `power` only)."""
        for table in sorted(self._dirty):
            self._sync_one(table)

    def listed(self, connection: Connection, frames: Sequence[FrameRef]) -> list[FrameRef]:
        """The frames as the catalog may list them: their segments are in it since before the files were made."""
        return list(frames)

    def abandon(self, frames: Sequence[FrameRef]) -> None:
        """Nothing: what is in a file stays there, unlisted."""

    def close(self) -> None:
        """Close the files; a later write begins new ones."""
        for table in list(self._open):
            self._leave(table)

    def _sync_one(self, table: str) -> None:
        if self._power and table in self._dirty:
            segment = self._open[table]
            try:
                with explained(segment.path, f"make rows of {table} durable"):
                    os.fdatasync(segment.fd)
                segment.synced = segment.offset
            except StoreError:
                self._leave(table)  # after a failed sync the page cache says nothing about the disk
                raise
        self._dirty.discard(table)

    def _leave(self, table: str) -> None:
        segment = self._open.pop(table)
        self._dirty.discard(table)
        os.close(segment.fd)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
