"""A batch from manifest to commit: written before its step, counted once after it, or given back."""

from __future__ import annotations

import time

import pyarrow as pa

from buffer_engine.errors import StoreError
from buffer_engine.store.append import Appender
from buffer_engine.store.base import BatchRecord, Reservation
from buffer_engine.store.catalog import Catalog, current_version, next_version
from buffer_engine.store.connection import Connection
from buffer_engine.store.history import note_batch
from buffer_engine.store.reserve import free, reserved_rows


def prepare(appender: Appender, reservation: Reservation, *, step: int, batch: pa.Table, rows: pa.Table) -> None:
    """See `ExperienceStore.prepare_batch`; a repeat with the same content is a no-op."""
    batch_id = reservation.batch_id
    _check_manifest(batch_id, step, batch, rows)
    wanted: list[str] = rows.column("experience_id").to_pylist()

    def mark_prepared(connection: Connection) -> None:
        status, known_step, expires_at = _state(connection, batch_id)
        if status in ("prepared", "committed") and known_step == step:
            return
        if status != "reserved":
            raise StoreError(f"batch {batch_id!r} is {status} (step {known_step}); reserve its rows again")
        if expires_at <= time.time():
            raise StoreError(
                f"the reservation of batch {batch_id!r} expired {time.time() - expires_at:.0f} s ago; "
                "reserve again, with a longer lease"
            )
        foreign = sorted(set(wanted) - set(reserved_rows(connection, batch_id)))
        if foreign:
            raise StoreError(f"batch {batch_id!r}: row {foreign[0]!r} is not reserved by it; take only reserved rows")
        connection.execute("UPDATE index_rollouts SET reserved_by = NULL WHERE reserved_by = ?", (batch_id,))
        connection.executemany(
            "UPDATE index_rollouts SET reserved_by = ? WHERE experience_id = ?", [(batch_id, row) for row in wanted]
        )
        connection.execute(
            "UPDATE batches SET status = 'prepared', step = ?, rows = ? WHERE batch_id = ?",
            (step, len(wanted), batch_id),
        )
        note_batch(connection, current_version(connection), batch_id)

    appender.append_all({"batches": batch, "batch_rows": rows}, inside=mark_prepared)


def commit(
    catalog: Catalog, appender: Appender, batch_id: str, *, step: int, model: pa.Table | None, stats: pa.Table | None
) -> None:
    """See `ExperienceStore.commit_batch`."""

    def count(connection: Connection) -> None:
        if _committed(connection, batch_id, step):
            return
        connection.execute(
            "UPDATE index_rollouts SET uses = uses + 1, trained_step = ?, reserved_by = NULL WHERE reserved_by = ?",
            (step, batch_id),
        )
        connection.execute(
            "UPDATE batches SET status = 'committed', committed_at = ? WHERE batch_id = ?", (time.time(), batch_id)
        )
        note_batch(connection, current_version(connection), batch_id)

    if not _committed(catalog.read(), batch_id, step):
        tables = {"models": model, "token_stats": stats}
        appender.append_all({name: rows for name, rows in tables.items() if rows is not None}, inside=count)


def release(catalog: Catalog, batch_id: str) -> None:
    """See `ExperienceStore.release`.

    Raises:
        StoreError: the batch is unknown or committed.
    """
    with catalog.transaction("release a batch") as connection:
        status, step, _ = _state(connection, batch_id)
        if status == "committed":
            raise StoreError(f"batch {batch_id!r} was committed at step {step}; what was trained cannot be released")
        if status != "released":
            free(connection, batch_id)
            note_batch(connection, next_version(connection), batch_id)


def release_unprepared(catalog: Catalog, run_id: str) -> None:
    """Free what a dead process of the run had reserved without writing a manifest."""
    query = "SELECT batch_id FROM batches WHERE run_id = ? AND status = 'reserved'"
    if catalog.read().execute(query, (run_id,)).fetchone() is None:
        return
    with catalog.transaction("release the run's reservations") as connection:
        freed = [batch_id for (batch_id,) in connection.execute(query, (run_id,)).fetchall()]
        for batch_id in freed:
            free(connection, batch_id)
        note_batch(connection, next_version(connection), *freed)


def records(connection: Connection, run_id: str) -> list[BatchRecord]:
    """See `ExperienceStore.batches`."""
    found = connection.execute(
        "SELECT batch_id, run_id, status, step, rows FROM batches WHERE run_id = ? "
        "ORDER BY step IS NULL, step, reserved_at, batch_id",
        (run_id,),
    )
    return [BatchRecord(*row) for row in found]


def _state(connection: Connection, batch_id: str) -> tuple[str, int | None, float]:
    found = connection.execute(
        "SELECT status, step, expires_at FROM batches WHERE batch_id = ?", (batch_id,)
    ).fetchone()
    if found is None:
        raise StoreError(f"batch {batch_id!r} is unknown; reserve it first")
    return found


def _committed(connection: Connection, batch_id: str, step: int) -> bool:
    """Whether the batch is committed at `step`; raises unless it is that or prepared for it."""
    status, known_step, _ = _state(connection, batch_id)
    if status not in ("prepared", "committed"):
        raise StoreError(f"batch {batch_id!r} is {status}; only a prepared batch can be committed")
    if known_step != step:
        raise StoreError(f"batch {batch_id!r} was {status} for step {known_step}, not {step}; commit the step it made")
    return status == "committed"


def _check_manifest(batch_id: str, step: int, batch: pa.Table, rows: pa.Table) -> None:
    for name, table in (("batches", batch), ("batch_rows", rows)):
        if "batch_id" not in table.column_names or set(table.column("batch_id").to_pylist()) != {batch_id}:
            raise StoreError(f"batch {batch_id!r}: every row of {name} must carry this batch_id, and there must be one")
    if batch.num_rows != 1 or "step" not in batch.column_names or batch.column("step")[0].as_py() != step:
        raise StoreError(f"batch {batch_id!r}: `batches` needs exactly one row, with step {step}")
    if "experience_id" not in rows.column_names:
        raise StoreError(f"batch {batch_id!r}: batch_rows needs the column experience_id")
    ids: list[str] = rows.column("experience_id").to_pylist()
    twice = sorted({one for one in ids if ids.count(one) > 1}) if len(set(ids)) < len(ids) else []
    if twice:
        raise StoreError(f"batch {batch_id!r}: row {twice[0]!r} occurs twice; a batch trains a row once")
