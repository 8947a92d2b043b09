"""Frames as the catalog lists them: which record batches a table has, and where each lies at present.

A frame keeps its id, version, rows and checksum for good. Its place changes once, or a few times, when compaction
moves its rows into a Parquet file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from buffer_engine.store.connection import Connection

FRAME_COLUMNS = (
    "f.frame_id, f.tbl, s.name, f.offset, f.length, f.rows, f.version, f.xxh3, s.head, s.head_xxh3, s.format"
)


@dataclass(frozen=True, slots=True)
class Frame:
    """One committed record batch: where it lies and what its bytes, and those of its file's schema, must hash to.

    Attributes:
        segment: file that holds it now.
        offset, length: bytes in an Arrow stream (`arrows`); first row and rows in a `parquet` file.
        xxh3: of the Arrow bytes that were appended; in a Parquet file it only tells which frame this is.
        head, head_xxh3: the schema message at the start of a stream; the page index and footer that end a Parquet file.
    """

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
    format: str

    def same_as(self, other: Frame) -> bool:
        """Whether this is the same frame, wherever the two lie."""
        mine, theirs = ((frame.frame_id, frame.table, frame.rows, frame.version, frame.xxh3) for frame in (self, other))
        return mine == theirs


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
