"""The catalog's bookkeeping of now, as Arrow tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple
from datetime import UTC, datetime

import pyarrow as pa

from buffer_engine.schema import BATCH_STATE, QUARANTINE, ROLLOUT_STATE
from buffer_engine.store.connection import Connection
from buffer_engine.store.damage import quarantined_frames
from buffer_engine.store.history import BatchEntry


def rollout_state(connection: Connection, run_id: str | None, status: str | None) -> pa.Table:
    """See `ExperienceStore.rollout_state`."""
    names: list[str] = ROLLOUT_STATE.names
    found = connection.execute(
        f"SELECT {', '.join(names)} FROM index_rollouts "
        "WHERE (:run IS NULL OR run_id = :run) AND (:status IS NULL OR status = :status) ORDER BY sequence",
        {"run": run_id, "status": status},
    )
    return _table(found.fetchall(), ROLLOUT_STATE)


def batch_state(connection: Connection) -> pa.Table:
    """See `ExperienceStore.batch_state`."""
    found = connection.execute(
        "SELECT batch_id, run_id, status, step, rows, reserved_at, committed_at FROM batches "
        "ORDER BY reserved_at, batch_id"
    )
    return _table([(*row[:5], _moment(row[5]), _moment(row[6])) for row in found], BATCH_STATE)


def batch_state_of(entries: Iterable[BatchEntry]) -> pa.Table:
    """`schema.BATCH_STATE` of these turns, one per batch."""
    rows = [
        (b.batch_id, b.run_id, b.status, b.step, b.rows, _moment(b.reserved_at), _moment(b.committed_at))
        for b in sorted(entries, key=lambda entry: (entry.reserved_at, entry.batch_id))
    ]
    return _table(rows, BATCH_STATE)


def quarantine(connection: Connection) -> pa.Table:
    """See `ExperienceStore.quarantine`."""
    found = quarantined_frames(connection)
    return _table([(*astuple(one)[:5], _moment(one.found_at), one.message) for one in found], QUARANTINE)


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def _table(rows: Sequence[Sequence[object]], schema: pa.Schema) -> pa.Table:
    # Column by column: unpacking half a million rows into `zip` takes as long as reading them.
    columns = [[row[place] for row in rows] for place in range(len(schema))]
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )
