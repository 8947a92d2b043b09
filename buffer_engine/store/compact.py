"""Compaction: frames move from append-only Arrow streams into Parquet files, under the eyes of readers and writers.

The rows, their frames, versions and order stay as they are; only the place of a frame changes, in one transaction per
file, after the file is complete and durable. A reader that looked a frame up before finds it where it was until the
grace is over, and where it is now afterwards. A kill, a full disk or a damaged frame leaves the store as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from buffer_engine.errors import CorruptSegmentError, StoreBusyError
from buffer_engine.schema import TABLES
from buffer_engine.store.catalog import Catalog
from buffer_engine.store.connection import Connection
from buffer_engine.store.faults import explained
from buffer_engine.store.files import SegmentFiles
from buffer_engine.store.frames import Frame
from buffer_engine.store.layout import StoreLayout, new_writer_id
from buffer_engine.store.making import MAKING
from buffer_engine.store.merging import plan, sizes_of
from buffer_engine.store.parquet import Label, ParquetFile, write_parquet
from buffer_engine.store.reading import SegmentReader
from buffer_engine.store.sweep import hold_compaction, remove_unfinished, sweep
from buffer_engine.store.validate import table_spec

GRACE_SECONDS = 600.0
"""How long a file stays that no frame refers to any more."""

Progress = Callable[[int, int], None]
"""Called with frames done and frames to do."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """What a compaction did.

    Attributes:
        frames, rows: moved into Parquet files, those of merged earlier files included.
        bytes_before, bytes_after: of those rows in the files that they were in, and in the new ones.
        files: names of the new files.
        retired: old files that no row lies in and that stay until their grace is over.
        removed, freed: old files that went, and bytes on disk that they took.
        damaged: frames that could not be read and stay where they are; one message each.
    """

    frames: int = 0
    rows: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    files: tuple[str, ...] = ()
    retired: int = 0
    removed: int = 0
    freed: int = 0
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Made:
    """A Parquet file that lies in its place and is not used yet."""

    name: str
    segment_id: int
    frames: tuple[Frame, ...]
    file: ParquetFile


class Compactor:
    """Moves frames of one store."""

    def __init__(self, layout: StoreLayout, catalog: Catalog, files: SegmentFiles) -> None:
        self._layout = layout
        self._catalog = catalog
        self._files = files
        self._writer_id = new_writer_id()
        self._count = 0

    def compact(
        self,
        *,
        everything: bool,
        grace_seconds: float,
        tables: Sequence[str] | None,
        max_uses: int,
        progress: Progress | None,
    ) -> Compaction:
        """Move cold frames into Parquet files; readers and writers go on meanwhile.

        Args:
            everything: also what training waits for, and the newest frames.
            grace_seconds: files that no frame refers to any more are removed this long after that was found.
            tables: only these; None: all.
            max_uses: a kept rollout trained fewer times than this is not cold.
            progress: told frames done and frames to do, after each file.

        Raises:
            StoreBusyError: another process compacts or erases.
            StoreError: the disk is full or read-only; what was finished stays finished, nothing is lost.
        """
        names = [table_spec(name).name for name in tables] if tables is not None else list(TABLES)
        with hold_compaction(self._catalog):
            remove_unfinished(self._catalog, self._files)
            passed_over: dict[int, str] = {}

            def files_of(name: str) -> list[list[Frame]]:
                with self._catalog.snapshot():
                    return plan(
                        self._catalog.read(), name, everything=everything, max_uses=max_uses, passed_over=passed_over
                    )  # fmt: skip

            plans = {name: files_of(name) for name in names}
            total = sum(len(frames) for files in plans.values() for frames in files)
            made: list[Made] = []
            before = done = 0
            for name in names:
                files = plans[name]
                while files:
                    frames = files.pop(0)
                    one = self._one_file(frames, passed_over)
                    if one is None:  # a frame is damaged: what can be merged without it?
                        files = files_of(name)
                        continue
                    before += self._weight(frames)
                    with self._catalog.transaction("move rows into a Parquet file", synced=True) as connection:
                        move(connection, [one])
                    made.append(one)
                    done += len(frames)
                    if progress is not None:
                        progress(done, total)
            swept = sweep(self._catalog, self._files, grace_seconds=grace_seconds)
        return Compaction(
            frames=sum(len(one.frames) for one in made),
            rows=sum(one.file.rows for one in made),
            bytes_before=before,
            bytes_after=sum(one.file.bytes for one in made),
            files=tuple(one.name for one in made),
            retired=swept.retired,
            removed=swept.removed,
            freed=swept.freed,
            damaged=tuple(passed_over.values()),
        )

    def write(
        self, frames: Sequence[Frame], *, change: Callable[[Frame, pa.RecordBatch], pa.RecordBatch] | None = None
    ) -> Made:
        """A Parquet file with these frames of one table, published and not used yet; call under `hold_compaction`.

        Args:
            change: what to write in place of a frame's rows; must keep their number and order.

        Raises:
            CorruptSegmentError: a frame is damaged.
            StoreError: the disk is full or read-only; the next compaction removes what was begun.
        """
        table = frames[0].table
        self._count += 1
        name = f"{table}/{self._writer_id}-{self._count}.parquet"
        with self._catalog.transaction(f"begin a Parquet file of {table}") as connection:
            connection.execute(
                "INSERT INTO segments (tbl, name, writer, head, head_xxh3, format) VALUES (?, ?, ?, 0, 0, 'parquet')",
                (table, name, self._writer_id),
            )
            (segment_id,) = connection.execute("SELECT segment_id FROM segments WHERE name = ?", (name,)).fetchone()
        path = self._layout.root / MAKING / name.replace("/", "-")
        reader = SegmentReader(self._layout, self._catalog, self._files)

        def batches() -> Iterator[tuple[Label, pa.RecordBatch]]:
            for frame in frames:
                rows = reader.batch(frame)
                label = Label(frame.frame_id, frame.version, frame.rows, frame.xxh3)
                yield label, rows if change is None else change(frame, rows)

        try:
            with explained(path, f"write a Parquet file of {table}"):
                file = write_parquet(path, TABLES[table], batches())
            self._files.publish(name, path)
        finally:
            reader.close()
            with explained(path, "remove a half-written file"):
                path.unlink(missing_ok=True)  # its room is needed most when the disk is full
        return Made(name, segment_id, tuple(frames), file)

    def _one_file(self, frames: Sequence[Frame], passed_over: dict[int, str]) -> Made | None:
        try:
            return self.write(frames)
        except CorruptSegmentError as error:
            reader = SegmentReader(self._layout, self._catalog, self._files)
            damaged = dict(_damaged(reader, frames))
            reader.close()
            if not damaged:
                raise error
            passed_over.update(damaged)
            return None

    def _weight(self, frames: Sequence[Frame]) -> int:
        """Bytes of the frames where they lie; files of an earlier compaction are always merged whole."""
        files = {frame.segment for frame in frames if frame.format == "parquet"}
        sizes = sizes_of(self._catalog.read(), frames[0].table) if files else {}
        return sum(frame.length for frame in frames if frame.format == "arrows") + sum(sizes[name] for name in files)


def move(connection: Connection, made: Sequence[Made]) -> None:
    """Let the frames of finished files lie in them from now on, inside the caller's transaction.

    Raises:
        StoreBusyError: a frame is no longer where it was read; nothing may be changed.
    """
    for one in made:
        places: list[tuple[int, int, int, int, int, str]] = []
        first = 0
        for frame in one.frames:
            places.append((one.segment_id, first, frame.rows, frame.frame_id, frame.offset, frame.segment))
            first += frame.rows
        moved = connection.executemany(
            "UPDATE frames SET segment_id = ?, offset = ?, length = ? WHERE frame_id = ? AND offset = ? "
            "AND segment_id = (SELECT segment_id FROM segments WHERE name = ?)",
            places,
        ).rowcount
        if moved != len(places):
            raise StoreBusyError(
                f"{one.name}: {len(places) - moved} of {len(places)} frames were moved by another process meanwhile; "
                "repeat"
            )
        connection.executemany(
            "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (one.segment_id, chunk.number, chunk.first, chunk.rows, chunk.offset, chunk.length, chunk.xxh3)
                for chunk in one.file.chunks
            ],
        )
        known = connection.execute(
            "UPDATE segments SET head = ?, head_xxh3 = ? WHERE segment_id = ?",
            (one.file.head, one.file.head_xxh3, one.segment_id),
        ).rowcount
        if not known:  # the lock was lost with the connection to a server
            raise StoreBusyError(f"{one.name}: another compaction took this for left over and removed it; repeat")


def _damaged(reader: SegmentReader, frames: Sequence[Frame]) -> Iterator[tuple[int, str]]:
    for frame in frames:
        try:
            reader.batch(frame)
        except CorruptSegmentError as error:
            yield frame.frame_id, str(error)
