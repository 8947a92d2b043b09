"""Files that no frame refers to any more: marked, kept for a while for readers of an older snapshot, then removed.

A process that appends holds a shared lock on the file that it writes, which falls with the process however it ends; a
stream whose lock is free has no writer. Everything here runs under the lock of compaction.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from buffer_engine.errors import StoreBusyError
from buffer_engine.store.catalog import Catalog
from buffer_engine.store.faults import explained
from buffer_engine.store.files import SegmentFiles, sync_path
from buffer_engine.store.layout import StoreLayout

MAKING = "making"
"""Folder of the store in which Parquet files are written before they are published, and the lock for doing so."""
_LOCK = "compact.lock"
_JUST_BEGUN = 60.0
"""Seconds for which an empty stream may belong to a writer that has not locked it yet."""
_UNUSED = "NOT EXISTS (SELECT 1 FROM frames f WHERE f.segment_id = segments.segment_id)"


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep did.

    Attributes:
        retired: files that no frame refers to and that stay until their grace is over.
        removed, freed: files that went, and bytes on disk that they took.
    """

    retired: int
    removed: int
    freed: int


@contextmanager
def hold_compaction(layout: StoreLayout) -> Generator[None]:
    """Be the only process that moves frames while the block runs; clears what a killed one had begun to write.

    Raises:
        StoreBusyError: another one does; names its pid.
    """
    making = layout.root / MAKING
    path = making / _LOCK
    with explained(path, "lock the store for compaction"):
        making.mkdir(exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(handle, 32, 0).decode().strip() or "unknown"
            raise StoreBusyError(
                f"{layout.root}: process {pid} compacts or erases in this store; wait for it, then repeat"
            ) from error
        with explained(path, "lock the store for compaction"):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
            for half in making.iterdir():
                if half != path:
                    half.unlink()
        yield
    finally:
        os.close(handle)


def remove_unfinished(layout: StoreLayout, catalog: Catalog, files: SegmentFiles) -> None:
    """Remove Parquet files that a killed compaction published and never used; nobody can have read them."""
    found = catalog.read().execute(
        f"SELECT segment_id, name FROM segments WHERE format = 'parquet' AND head = 0 AND {_UNUSED}"
    )
    _remove(layout, catalog, files, found.fetchall())


def sweep(layout: StoreLayout, catalog: Catalog, files: SegmentFiles, *, grace_seconds: float) -> Swept:
    """Mark files that no frame refers to and no process writes; remove those marked `grace_seconds` ago or earlier."""
    now = time.time()
    unused = catalog.read().execute(
        f"SELECT segment_id, name, head, format FROM segments WHERE retired_at IS NULL AND {_UNUSED}"
    )
    idle = [
        (now, segment_id)
        for segment_id, name, head, form in unused.fetchall()
        if form == "parquet" or not being_written(layout.segment(name), head)
    ]
    if idle:
        with catalog.transaction("retire segments", synced=True) as connection:
            connection.executemany(f"UPDATE segments SET retired_at = ? WHERE segment_id = ? AND {_UNUSED}", idle)
    due = catalog.read().execute(
        f"SELECT segment_id, name FROM segments WHERE retired_at <= ? AND {_UNUSED}", (now - grace_seconds,)
    )
    removable: list[tuple[int, str]] = due.fetchall()
    freed = 0
    for _, name in removable:
        with suppress(FileNotFoundError):  # removed by a sweep that was killed before it could say so
            freed += layout.segment(name).stat().st_blocks * 512
    _remove(layout, catalog, files, removable)
    (kept,) = catalog.read().execute("SELECT count(*) FROM segments WHERE retired_at IS NOT NULL").fetchone()
    return Swept(kept, len(removable), freed)


def _remove(layout: StoreLayout, catalog: Catalog, files: SegmentFiles, segments: Sequence[tuple[int, str]]) -> None:
    if not segments:
        return
    for _, name in segments:
        files.remove(name)
    for folder in {layout.segment(name).parent for _, name in segments}:
        if folder.exists():
            sync_path(folder)  # else a file could come back that the catalog no longer knows
    with catalog.transaction("forget removed segments") as connection:
        ids = [(segment_id,) for segment_id, _ in segments]
        connection.executemany("DELETE FROM chunks WHERE segment_id = ?", ids)
        connection.executemany(f"DELETE FROM segments WHERE segment_id = ? AND {_UNUSED}", ids)


def being_written(path: Path, head: int) -> bool:
    """Whether a process appends to the stream at `path`, or may be about to.

    Args:
        head: bytes of the schema message that it begins with.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # its writer was killed before it made the file, or is about to make it
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        if any(os.pread(handle, 4, head)):  # by a writer that had locked the file before
            return False
        return time.time() - os.fstat(handle).st_mtime < _JUST_BEGUN
    finally:
        os.close(handle)
