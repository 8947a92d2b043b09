"""How large a store is: rows and bytes per table, as appended and in Parquet files, and what a token costs."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc

from buffer_engine.schema import SCHEMA_VERSION
from buffer_engine.store.base import Durability, StoreInfo
from buffer_engine.store.catalog import current_version
from buffer_engine.store.connection import Connection
from buffer_engine.store.damage import quarantined_frames
from buffer_engine.store.files import SegmentFiles
from buffer_engine.store.frames import frames_of
from buffer_engine.store.reading import SegmentReader

_HOT = (
    "SELECT f.tbl, sum(f.length) FROM frames f JOIN segments s USING (segment_id) "
    "WHERE s.format = 'arrows' GROUP BY f.tbl"
)
_COLD = (
    "SELECT s.tbl, sum(s.head) + sum((SELECT coalesce(sum(c.length), 0) FROM chunks c "
    "WHERE c.segment_id = s.segment_id)) FROM segments s WHERE s.format = 'parquet' AND s.retired_at IS NULL "
    "GROUP BY s.tbl"
)


def store_info(
    path: Path,
    connection: Connection,
    files: SegmentFiles,
    reader: SegmentReader,
    durability: Durability,
    *,
    tokens: bool,
) -> StoreInfo:
    """See `LocalStore.info`."""
    rows: dict[str, int] = dict(
        connection.execute("SELECT tbl, sum(rows) FROM frames GROUP BY tbl ORDER BY tbl").fetchall()
    )
    hot: dict[str, int] = dict(connection.execute(_HOT).fetchall())
    cold: dict[str, int] = dict(connection.execute(_COLD).fetchall())
    retired = connection.execute("SELECT name FROM segments WHERE retired_at IS NOT NULL").fetchall()
    return StoreInfo(
        path=path,
        schema_version=SCHEMA_VERSION,
        version=current_version(connection),
        durability=durability,
        rows=rows,
        bytes={table: hot.get(table, 0) + cold.get(table, 0) for table in rows},
        runs=tuple(row[0] for row in connection.execute("SELECT run_id FROM runs ORDER BY run_id")),
        quarantined=tuple(quarantined_frames(connection)),
        cold_bytes=cold,
        retired_bytes=files.bytes_of([name for (name,) in retired]),
        trainable_tokens=_trainable(connection, reader) if tokens else None,
    )


def _trainable(connection: Connection, reader: SegmentReader) -> int:
    """Tokens that may train: true elements of the masks, which are all that is decoded of a Parquet file.

    Damaged frames do not count: they are listed as such beside this number.
    """
    total = 0
    sound = reader.batches(frames_of(connection, "rollouts"), ["loss_mask"], on_damage=lambda _frame, _error: None)
    for batch in sound:
        total += pc.sum(pc.list_flatten(batch.column(0))).as_py() or 0
    return total
