"""Damaged frames, set aside so that nothing else suffers.

A frame whose bytes are gone or changed is put into quarantine by whoever meets it first and may write. From then on
reads of whole tables go on without it and warn; whoever asks for one of its rows by name gets an error that names row
and frame. `recheck` reads such frames again and gives back what is sound.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import pyarrow as pa

from buffer_engine.errors import CorruptSegmentError, DamagedRowsWarning, StoreError
from buffer_engine.schema import DECISIONS, TableSpec
from buffer_engine.store.append import Appender
from buffer_engine.store.catalog import Catalog
from buffer_engine.store.connection import Connection
from buffer_engine.store.damage import DamagedFrameError, GuardedReader, quarantined_ids
from buffer_engine.store.keyblocks import KeyBlocks, only_about
from buffer_engine.store.padded import TOKEN_COLUMNS
from buffer_engine.store.reading import Frame, frames_by_id, rows_at
from buffer_engine.store.register import Register
from buffer_engine.store.segments import FrameWriter

T = TypeVar("T")


class Quarantine:
    """Reads of one store that survive damage."""

    def __init__(
        self, catalog: Catalog, appender: Appender, writer: FrameWriter, reader: GuardedReader, blocks: KeyBlocks
    ) -> None:
        self._catalog = catalog
        self._register = Register(catalog, appender, writer)
        self._reader = reader
        self._blocks = blocks
        self._warned: set[int] = set()
        self._guard = threading.Lock()

    def batches(
        self, connection: Connection, frames: Iterable[Frame], columns: Sequence[str] | None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of the sound ones of `frames`; what is quarantined now is not read again."""
        held = quarantined_ids(connection)
        sound = self._not_held(frames, held) if held else frames
        return self._reader.batches(sound, columns, on_damage=lambda frame, error: self.put(frame, str(error)))

    def naming(
        self,
        ids: Sequence[str],
        places: Sequence[tuple[int, int]],
        frames: Mapping[int, Frame],
        read: Callable[[], T],
    ) -> T:
        """The result of `read`, which reads the rollouts `ids` at `places` of `frames`.

        Raises:
            CorruptSegmentError: one of them lies in a damaged frame; names both.
        """
        held = quarantined_ids(self._catalog.read()) & frames.keys()
        if held:
            frame = frames[min(held)]
            raise self._refusal(frame, ids, places, self._message_of(frame))
        try:
            return read()
        except DamagedFrameError as error:
            self.put(error.frame, str(error))
            raise self._refusal(error.frame, ids, places, str(error)) from error

    def rows_found(self, connection: Connection, places: Sequence[tuple[int, int]], spec: TableSpec) -> pa.Table:
        """The rows at those of `places` whose frames are sound, in the order asked."""
        frames = frames_by_id(connection, (frame_id for frame_id, _ in places))
        left_out = quarantined_ids(connection) & frames.keys()
        for frame_id in sorted(left_out):
            self._warn(frames[frame_id], self._message_of(frames[frame_id]))
        while True:
            sound = [place for place in places if place[0] not in left_out] if left_out else places
            try:
                return rows_at(self._reader, frames, sound, spec, None)
            except DamagedFrameError as error:
                self.put(error.frame, str(error))
                left_out.add(error.frame.frame_id)

    def noting(self, write: Callable[[], T]) -> T:
        """The result of `write`; a damaged frame that it stumbles over goes into quarantine before it fails.

        Raises:
            CorruptSegmentError: as `write` does.
        """
        try:
            return write()
        except DamagedFrameError as error:
            self.put(error.frame, str(error))
            raise

    def reserve_sound(self, reserve: Callable[[], T | None], rows_of: str, give_back: Callable[[], None]) -> T | None:
        """A reservation none of whose rows is damaged; damaged ones are rejected and others are reserved instead.

        Args:
            reserve: makes or renews the reservation of batch `rows_of`.
            give_back: frees that batch.
        """
        met: set[int] = set()
        while True:
            try:
                found = reserve()
            except DamagedFrameError as error:  # a policy read it; its transaction has been rolled back
                if error.frame.frame_id in met:
                    raise
                met.add(error.frame.frame_id)
                self.put(error.frame, str(error))
                continue
            if found is None or not self._damage_in(rows_of):
                return found
            give_back()

    def put(self, frame: Frame, message: str) -> None:
        """Put a frame into quarantine, where it is not there already, and warn.

        A disk that takes no more rows does not keep anybody from reading: the warning says that nothing was noted.
        """
        if self._catalog.read_only:
            message += " (opened read-only, so this is noted nowhere)"
        else:
            try:
                self._register.put(frame, message)
            except StoreError as error:
                message += f" (it could not be put into quarantine: {error})"
        self._warn(frame, message)

    def recheck(self, frames: Iterable[Frame]) -> tuple[list[int], list[int]]:
        """Read `frames` again: ids of those newly put into quarantine, and of those that came out of it.

        Raises:
            StoreError: the store is read-only, the disk is full.
        """
        held = quarantined_ids(self._catalog.read())
        put: list[int] = []
        released: list[int] = []
        self._reader.close()
        for frame in frames:
            try:
                self._reader.batch(frame)
            except DamagedFrameError as error:
                if self._register.put(frame, str(error)):
                    put.append(frame.frame_id)
            else:
                if frame.frame_id in held and self._register.release(frame, self._decisions):
                    released.append(frame.frame_id)
                    with self._guard:
                        self._warned.discard(frame.frame_id)
        return put, released

    def _not_held(self, frames: Iterable[Frame], held: set[int]) -> Iterator[Frame]:
        for frame in frames:
            if frame.frame_id in held:
                self._warn(frame, self._message_of(frame))
            else:
                yield frame

    def _damage_in(self, batch_id: str) -> bool:
        """Whether rows reserved by a batch are damaged; their frames are in quarantine afterwards."""
        connection = self._catalog.read()
        found = connection.execute("SELECT DISTINCT frame_id FROM index_rollouts WHERE reserved_by = ?", (batch_id,))
        ids = [row[0] for row in found]
        damaged = bool(quarantined_ids(connection) & set(ids))
        for frame in frames_by_id(connection, ids).values():
            try:
                self._reader.arrays(frame, TOKEN_COLUMNS)
            except DamagedFrameError as error:
                self.put(frame, str(error))
                damaged = True
        return damaged

    def _decisions(self, connection: Connection, ids: Sequence[str]) -> pa.Table:
        places = self._blocks.about(connection, "decisions", ids)
        return only_about(self.rows_found(connection, places, DECISIONS), ids)

    def _message_of(self, frame: Frame) -> str:
        found = (
            self._catalog.read()
            .execute("SELECT message FROM quarantine WHERE frame_id = ?", (frame.frame_id,))
            .fetchone()
        )
        return f"segments/{frame.segment}@{frame.offset} was in quarantine" if found is None else str(found[0])

    def _refusal(
        self, frame: Frame, ids: Sequence[str], places: Sequence[tuple[int, int]], message: str
    ) -> CorruptSegmentError:
        lost = [one for one, (frame_id, _) in zip(ids, places, strict=True) if frame_id == frame.frame_id]
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        return CorruptSegmentError(
            f"rollout {lost[0]!r}{more} cannot be read: {message}; after that, "
            f"`buffer-engine store recheck {self._catalog.layout.root}` takes the frame back",
            frame_id=frame.frame_id,
        )

    def _warn(self, frame: Frame, message: str) -> None:
        with self._guard:
            if frame.frame_id in self._warned:
                return
            self._warned.add(frame.frame_id)
        warnings.warn(
            f"{frame.rows} rows of {frame.table} are left out, because their frame is damaged: {message}",
            DamagedRowsWarning,
            stacklevel=2,
        )
