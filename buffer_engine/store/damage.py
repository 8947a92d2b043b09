"""What is damaged and how it is met: one error per frame, and reads that leave such frames behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import pyarrow as pa

from buffer_engine.errors import CorruptSegmentError
from buffer_engine.store.base import QuarantinedFrame
from buffer_engine.store.catalog import Catalog
from buffer_engine.store.connection import Connection
from buffer_engine.store.files import SegmentFiles
from buffer_engine.store.layout import StoreLayout
from buffer_engine.store.reading import Frame, SegmentReader

T = TypeVar("T")


class DamagedFrameError(CorruptSegmentError):
    """A frame cannot be read; never leaves the store without the row that was asked for."""

    def __init__(self, frame: Frame, message: str) -> None:
        super().__init__(message, frame_id=frame.frame_id)
        self.frame = frame


class GuardedReader(SegmentReader):
    """A reader that knows which frame is damaged, and is not misled by a file that was put back meanwhile."""

    def __init__(self, layout: StoreLayout, catalog: Catalog, files: SegmentFiles | None = None) -> None:
        super().__init__(layout, catalog, files)
        self._fresh = lambda: SegmentReader(layout, catalog, files)

    def batch(self, frame: Frame, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """See `SegmentReader.batch`.

        Raises:
            DamagedFrameError: the frame is damaged, seen through the old map of its file and a new one.
        """
        return self._twice(frame, lambda: super(GuardedReader, self).batch(frame, columns), _batch_of(frame, columns))

    def arrays(self, frame: Frame, columns: Sequence[str]) -> list[pa.Array]:
        """See `SegmentReader.arrays`.

        Raises:
            DamagedFrameError: see `batch`.
        """
        return self._twice(frame, lambda: super(GuardedReader, self).arrays(frame, columns), _arrays_of(frame, columns))

    def _twice(self, frame: Frame, read: Callable[[], T], read_by: Callable[[SegmentReader], T]) -> T:
        try:
            return read()
        except DamagedFrameError:
            raise
        except CorruptSegmentError:
            pass
        try:
            again = read_by(self._fresh())
        except CorruptSegmentError as error:
            raise DamagedFrameError(frame, str(error)) from error
        self.close()  # maps of files that are no longer there
        return again


def _batch_of(frame: Frame, columns: Sequence[str] | None) -> Callable[[SegmentReader], pa.RecordBatch]:
    return lambda reader: reader.batch(frame, columns)


def _arrays_of(frame: Frame, columns: Sequence[str]) -> Callable[[SegmentReader], list[pa.Array]]:
    return lambda reader: reader.arrays(frame, columns)


def quarantined_ids(connection: Connection) -> set[int]:
    """Ids of the frames in quarantine."""
    return {row[0] for row in connection.execute("SELECT frame_id FROM quarantine")}


def quarantined_frames(connection: Connection) -> list[QuarantinedFrame]:
    """The frames in quarantine, in the order of commit."""
    found = connection.execute(
        "SELECT q.frame_id, f.tbl, s.name, f.offset, f.rows, q.found_at, q.message FROM quarantine q "
        "JOIN frames f USING (frame_id) JOIN segments s USING (segment_id) ORDER BY q.frame_id"
    )
    return [QuarantinedFrame(*row) for row in found]


def past_damage(read: Callable[[], T]) -> T:
    """The result of `read`, which looks up which rows to read and reads them; again when a frame went meanwhile.

    Each repeat leaves one frame more behind, because its rows are rejected when it goes into quarantine.

    Raises:
        CorruptSegmentError: `read` asks for the same damaged frame again.
    """
    met: set[int] = set()
    while True:
        try:
            return read()
        except CorruptSegmentError as error:
            if error.frame_id is None or error.frame_id in met:
                raise
            met.add(error.frame_id)
