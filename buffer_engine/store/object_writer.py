"""Segments for writing on an object store: what one append writes to a table is one object, put before the commit.

An object holds the schema and the record batches, so it is an Arrow IPC stream as a segment file is. The catalog lists
it in the transaction that lists its frames: a process killed between the two leaves an object that nobody refers to.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import pyarrow as pa

from buffer_engine.schema import TABLES
from buffer_engine.store.connection import Connection
from buffer_engine.store.layout import new_writer_id, segment_name
from buffer_engine.store.objects import ObjectFiles
from buffer_engine.store.segments import FrameRef, frame_checksum

_PUTS_AT_ONCE = 8
_UNLISTED = 4096
"""Objects remembered by their names; all but the newest are listed or belong to appends that came to nothing."""


@dataclass(slots=True)
class _Object:
    """An object in the making; `number` stands for its segment id until the catalog gives one."""

    table: str
    number: int
    name: str
    parts: list[pa.Buffer]
    size: int
    put: Future[None] | None = None


@dataclass(slots=True)
class _Listed:
    name: str
    table: str
    head: int
    head_xxh3: int


class ObjectWriter:
    """The objects that this process writes; the same shape as `SegmentWriter`."""

    def __init__(self, files: ObjectFiles) -> None:
        self._files = files
        self._writer_id = new_writer_id()
        self._count = 0
        self._open: dict[str, _Object] = {}
        self._put: dict[int, _Listed] = {}
        self._pool: ThreadPoolExecutor | None = None

    def ensure(self, table: str, *, room: int = 0) -> None:
        """Nothing: an object is begun by what is written into it."""

    def write(self, table: str, batch: pa.RecordBatch, *, may_roll: bool = True) -> FrameRef:
        """Add a record batch to the object of `table` that the next `sync` puts."""
        data = batch.serialize()
        made = self._open.get(table)
        if made is None:
            self._count += 1
            head = TABLES[table].schema.serialize()
            name = segment_name(table, self._writer_id, self._count)
            made = self._open[table] = _Object(table, -self._count, name, [head], head.size)
            while len(self._put) >= _UNLISTED:
                self._put.pop(next(iter(self._put)))
            self._put[made.number] = _Listed(name, table, head.size, frame_checksum(memoryview(head)))
        offset = made.size
        made.parts.append(data)
        made.size += data.size
        return FrameRef(table, made.number, offset, data.size, batch.num_rows, frame_checksum(memoryview(data)))

    def start_sync(self) -> None:
        """Begin to put the objects written since the last `sync`."""
        for made in self._open.values():
            if made.put is None:
                self._pool = self._pool or ThreadPoolExecutor(_PUTS_AT_ONCE, thread_name_prefix="put-objects")
                made.put = self._pool.submit(self._files.write, made.name, _joined(made.parts))

    def sync(self) -> None:
        """Wait until the object store has acknowledged everything written since the last call.

        Raises:
            StoreError: it refused an object; none of these will be listed.
        """
        if len(self._open) > 1:
            self.start_sync()
        done, self._open = self._open, {}
        failures: list[BaseException] = []
        for made in done.values():
            try:
                if made.put is None:  # a single one needs no thread
                    self._files.write(made.name, _joined(made.parts))
                else:
                    made.put.result()
            except Exception as error:  # noqa: BLE001 - raised below, once no other put is running
                failures.append(error)
        if failures:
            raise failures[0]

    def listed(self, connection: Connection, frames: Sequence[FrameRef]) -> list[FrameRef]:
        """The frames with the segment ids that the catalog gives their objects, inside the caller's transaction."""
        ids: dict[int, int] = {}
        for number in dict.fromkeys(frame.segment_id for frame in frames if frame.segment_id < 0):
            one = self._put[number]
            ((ids[number],),) = connection.execute(
                "INSERT INTO segments (tbl, name, writer, head, head_xxh3) VALUES (?, ?, ?, ?, ?) RETURNING segment_id",
                (one.table, one.name, self._writer_id, one.head, one.head_xxh3),
            ).fetchall()
        return [replace(one, segment_id=ids.get(one.segment_id, one.segment_id)) for one in frames]

    def abandon(self, frames: Sequence[FrameRef]) -> None:
        """Remove the objects of frames whose transaction was rolled back for certain.

        Raises:
            StoreError: the object store refuses; what is left is an orphan that `verify` reports.
        """
        numbers = dict.fromkeys(frame.segment_id for frame in frames)
        self._files.remove([self._put.pop(number).name for number in numbers])

    def close(self) -> None:
        """Let what is being put end; it will not be listed."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _joined(parts: Sequence[pa.Buffer]) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    for part in parts:
        sink.write(part)
    return sink.getvalue()
