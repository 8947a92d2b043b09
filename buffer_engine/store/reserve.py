"""Reservations: a policy's choice made once and for all readers, in one transaction.

Everything that decides which rows come next is in `policies`; here is what makes the decision hold: freed leases, a
repeat that finds its rows again, verdicts and reservation together, nothing when it is too little.
"""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa

from buffer_engine.errors import StoreError
from buffer_engine.schema import TABLES
from buffer_engine.store.append import Appender
from buffer_engine.store.base import ReadPolicy, Reservation
from buffer_engine.store.catalog import Catalog, next_version
from buffer_engine.store.connection import Connection
from buffer_engine.store.history import note_batch
from buffer_engine.store.policies.choosing import Choice, choose
from buffer_engine.store.policies.facts import Facts
from buffer_engine.store.policies.limiting import first_time, too_far_ahead
from buffer_engine.store.policies.picking import recall, remember
from buffer_engine.store.reading import SegmentReader
from buffer_engine.store.segments import FrameWriter

_Row = dict[str, object]
_CACHE_KIB = 32 * 1024
"""Pages of the catalog that a reader keeps in memory; SQLite's 2 MiB do not hold the upper levels of its indexes."""


class Reserver:
    """Reservations of one store."""

    def __init__(self, catalog: Catalog, appender: Appender, writer: FrameWriter, reader: SegmentReader) -> None:
        self._catalog = catalog
        self._appender = appender
        self._writer = writer
        self._reader = reader

    def reserve(
        self, policy: ReadPolicy, *, run_id: str, batch_id: str, model_version: int, lease_seconds: float, now: float
    ) -> Reservation | None:
        """See `ExperienceStore.reserve`. A repeat for a batch still reserved by the run renews and returns it.

        Raises:
            StoreError: the batch id has a manifest already, or a group alone is larger than `policy.rows`.
        """
        with self._catalog.lock:
            # a new segment needs a transaction of its own
            self._writer.ensure("decisions")
            if policy.samples_per_insert is not None or policy.type == "mixture":
                self._writer.ensure("events")
            with self._catalog.transaction("reserve a batch") as connection:
                connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
                expires_at, moment = now + lease_seconds, datetime.fromtimestamp(now, UTC)
                freed = _free_expired(connection, now)
                held = _held_by(connection, batch_id, run_id, model_version, freed)
                if held is not None:
                    connection.execute("UPDATE batches SET expires_at = ? WHERE batch_id = ?", (expires_at, batch_id))
                    note_batch(connection, next_version(connection), *freed)
                    return Reservation(batch_id, run_id, held[0], model_version, expires_at, held[1])
                choice = choose(
                    connection, Facts(connection, self._reader), policy,
                    run_id=run_id, batch_id=batch_id, model_version=model_version,
                )  # fmt: skip
                enough = len(choice.rows) >= policy.min_rows
                waits = too_far_ahead(connection, policy, run_id, len(choice.rows)) if enough else None
                reserved = enough and waits is None
                decisions = [_verdict("reject", *refusal) for refusal in choice.refused]
                events: list[_Row] = []
                if waits is not None and first_time(connection, run_id, batch_id):
                    events.append(_event("rate_limited", 1, f"batch {batch_id}: {waits}"))
                if reserved:
                    decisions += [
                        _verdict("mask", one, "over_age", f"oldest token version {version}")
                        for one, version in choice.masked
                    ]
                    if choice.off_ratio:
                        events.append(_event("mixture_short", 1, f"batch {batch_id}: {choice.off_ratio}"))
                if not (freed or decisions or events or reserved):
                    return None
                version = next_version(connection)
                note_batch(connection, version, *freed)
                self._append(
                    connection,
                    version,
                    {"decisions": decisions, "events": events},
                    {"run_id": run_id, "pass_id": batch_id, "decided_at": moment, "recorded_at": moment},
                )
                if not reserved:
                    return None
                ids = _take(connection, policy, choice, batch_id)
                connection.execute(
                    "INSERT OR REPLACE INTO batches VALUES (?, ?, 'reserved', NULL, ?, ?, ?, ?, NULL)",
                    (batch_id, run_id, len(ids), model_version, now, expires_at),
                )
                note_batch(connection, version, batch_id)
                return Reservation(batch_id, run_id, ids, model_version, expires_at, tuple(choice.weights))

    def _append(self, connection: Connection, version: int, tables: dict[str, list[_Row]], common: _Row) -> None:
        """Append rows in this transaction, with those of the columns `common` that their table has."""
        given: dict[str, pa.Table] = {}
        for name, rows in tables.items():
            schema = TABLES[name].schema
            shared = {key: value for key, value in common.items() if key in schema.names}
            if rows:
                given[name] = pa.Table.from_pylist([row | shared for row in rows], schema=schema)
        if given:
            fresh = self._appender.select_new(connection, self._appender.stage(given))
            self._appender.record(connection, version, fresh, self._appender.write(fresh, may_roll=False))


def free(connection: Connection, batch_id: str) -> None:
    """Give a batch's rows back, inside the caller's transaction."""
    connection.execute("UPDATE index_rollouts SET reserved_by = NULL WHERE reserved_by = ?", (batch_id,))
    connection.execute("UPDATE batches SET status = 'released' WHERE batch_id = ?", (batch_id,))


def reserved_rows(connection: Connection, batch_id: str) -> tuple[str, ...]:
    """Rows that a batch holds, in reading order."""
    found = connection.execute(
        "SELECT experience_id FROM index_rollouts WHERE reserved_by = ? "
        "ORDER BY group_first, group_id, sample_index, attempt, turn_index, sequence",
        (batch_id,),
    )
    return tuple(row[0] for row in found)


def _free_expired(connection: Connection, now: float) -> list[str]:
    expired = connection.execute(
        "SELECT batch_id FROM batches WHERE status = 'reserved' AND expires_at <= ?", (now,)
    ).fetchall()
    for (batch_id,) in expired:
        free(connection, batch_id)
    return [batch_id for (batch_id,) in expired]


def _held_by(
    connection: Connection, batch_id: str, run_id: str, model_version: int, freed: list[str]
) -> tuple[tuple[str, ...], tuple[float, ...]] | None:
    """Rows and weights of a live reservation of this very batch; None when there is none to continue.

    A reservation for other weights is given back and its id added to `freed`.
    """
    found = connection.execute(
        "SELECT run_id, status, step, model_version FROM batches WHERE batch_id = ?", (batch_id,)
    ).fetchone()
    if found is None:
        return None
    owner, status, step, version = found
    if owner != run_id:
        raise StoreError(f"batch {batch_id!r} belongs to run {owner!r}, not {run_id!r}; batch ids name one batch")
    if status in ("prepared", "committed") or step is not None:
        raise StoreError(
            f"batch {batch_id!r} is {status} and has a manifest for step {step}; "
            "replay or release it, and reserve under a new id"
        )
    if status == "reserved" and version == model_version:
        held = recall(connection, batch_id) or (reserved_rows(connection, batch_id), ())
        if held[0]:
            return held
    free(connection, batch_id)
    if status == "reserved":
        freed.append(batch_id)
    return None


def _take(connection: Connection, policy: ReadPolicy, choice: Choice, batch_id: str) -> tuple[str, ...]:
    ids = tuple(row.experience_id for row in choice.rows)
    connection.executemany(
        "UPDATE index_rollouts SET reserved_by = ? WHERE experience_id = ?", [(batch_id, one) for one in ids]
    )
    if policy.type != "fifo" or policy.balance is not None:
        remember(connection, batch_id, ids, choice.weights)
    return ids


def _verdict(verdict: str, experience_id: str, reason: str, detail: str) -> _Row:
    return {
        "experience_id": experience_id, "verdict": verdict, "operator": "reader", "reason": reason, "detail": detail,
    }  # fmt: skip


def _event(kind: str, count: int, detail: str) -> _Row:
    return {"kind": kind, "count": count, "detail": detail}
