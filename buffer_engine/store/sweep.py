"""Files that no frame refers to any more: marked, kept for a while for readers of an older snapshot, then removed.

Everything here runs under the lock of compaction.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from buffer_engine.store.catalog import Catalog
from buffer_engine.store.files import SegmentFiles
from buffer_engine.store.making import clear_making

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
def hold_compaction(catalog: Catalog) -> Generator[None]:
    """Be the only process that moves frames while the block runs; clears what a killed one had begun to write.

    Raises:
        StoreBusyError: another one does; names it.
    """
    with catalog.hold_compaction():
        clear_making(catalog.layout.root)
        yield


def remove_unfinished(catalog: Catalog, files: SegmentFiles) -> None:
    """Remove Parquet files that a killed compaction published and never used; nobody can have read them."""
    found = catalog.read().execute(
        f"SELECT segment_id, name FROM segments WHERE format = 'parquet' AND head = 0 AND {_UNUSED}"
    )
    _remove(catalog, files, found.fetchall())


def sweep(catalog: Catalog, files: SegmentFiles, *, grace_seconds: float) -> Swept:
    """Mark files that no frame refers to and no process writes; remove those marked `grace_seconds` ago or earlier."""
    now = time.time()
    unused = catalog.read().execute(
        f"SELECT segment_id, name, head, format FROM segments WHERE retired_at IS NULL AND {_UNUSED}"
    )
    idle = [
        (now, segment_id)
        for segment_id, name, head, form in unused.fetchall()
        if form == "parquet" or not files.being_written(name, head)
    ]
    if idle:
        with catalog.transaction("retire segments", synced=True) as connection:
            connection.executemany(f"UPDATE segments SET retired_at = ? WHERE segment_id = ? AND {_UNUSED}", idle)
    due = catalog.read().execute(
        f"SELECT segment_id, name FROM segments WHERE retired_at <= ? AND {_UNUSED}", (now - grace_seconds,)
    )
    removable: list[tuple[int, str]] = due.fetchall()
    freed = files.bytes_of([name for _, name in removable])
    _remove(catalog, files, removable)
    (kept,) = catalog.read().execute("SELECT count(*) FROM segments WHERE retired_at IS NOT NULL").fetchone()
    return Swept(kept, len(removable), freed)


def _remove(catalog: Catalog, files: SegmentFiles, segments: Sequence[tuple[int, str]]) -> None:
    if not segments:
        return
    files.remove([name for _, name in segments])
    with catalog.transaction("forget removed segments") as connection:
        ids = [(segment_id,) for segment_id, _ in segments]
        connection.executemany("DELETE FROM chunks WHERE segment_id = ?", ids)
        connection.executemany(f"DELETE FROM segments WHERE segment_id = ? AND {_UNUSED}", ids)
