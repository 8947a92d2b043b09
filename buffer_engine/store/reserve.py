"""Which rows a batch takes next: whole groups, first come first served, never one twice at a time.

Groups are read in order of their first row's arrival, so the same rows give the same batches. The walk stops as soon as
the batch is full and looks only at groups with a kept row that may still train.
"""

from __future__ import annotations

import heapq
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pyarrow as pa

from buffer_engine.errors import StoreError
from buffer_engine.schema import DECISIONS
from buffer_engine.store.append import Appender
from buffer_engine.store.base import ReadPolicy, Reservation
from buffer_engine.store.catalog import Catalog, next_version
from buffer_engine.store.history import note_batch
from buffer_engine.store.segments import SegmentWriter


@dataclass(frozen=True, slots=True)
class _Row:
    experience_id: str
    status: str
    uses: int
    reserved_by: str | None
    failed: bool
    group_size: int
    sample_index: int
    model_version: int | None


@dataclass(slots=True)
class _Choice:
    """What one reservation takes and what it rejects: (experience id, reason, detail)."""

    taken: list[str] = field(default_factory=list[str])
    rejected: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])


class Reserver:
    """Reservations of one store."""

    def __init__(self, catalog: Catalog, appender: Appender, writer: SegmentWriter) -> None:
        self._catalog = catalog
        self._appender = appender
        self._writer = writer

    def reserve(
        self, policy: ReadPolicy, *, run_id: str, batch_id: str, model_version: int, lease_seconds: float, now: float
    ) -> Reservation | None:
        """See `ExperienceStore.reserve`. A repeat for a batch still reserved by the run renews and returns it.

        Raises:
            StoreError: the batch id has a manifest already, or a group alone is larger than `policy.rows`.
        """
        with self._catalog.lock:
            self._writer.ensure("decisions")  # a new segment needs a transaction of its own
            with self._catalog.transaction("reserve a batch") as connection:
                freed = _free_expired(connection, now)
                held = _held_by(connection, batch_id, run_id, model_version, freed)
                if held:
                    connection.execute(
                        "UPDATE batches SET expires_at = ? WHERE batch_id = ?", (now + lease_seconds, batch_id)
                    )
                    note_batch(connection, next_version(connection), *freed)
                    return Reservation(batch_id, run_id, held, model_version, now + lease_seconds)
                choice = _choose(connection, policy, run_id, model_version)
                reserved = len(choice.taken) >= policy.min_rows
                if not (freed or choice.rejected or reserved):
                    return None
                version = next_version(connection)
                note_batch(connection, version, *freed)
                self._reject(connection, version, choice.rejected, run_id, batch_id, now)
                if not reserved:
                    return None
                connection.executemany(
                    "UPDATE index_rollouts SET reserved_by = ? WHERE experience_id = ?",
                    [(batch_id, experience_id) for experience_id in choice.taken],
                )
                connection.execute(
                    "INSERT OR REPLACE INTO batches VALUES (?, ?, 'reserved', NULL, ?, ?, ?, ?, NULL)",
                    (batch_id, run_id, len(choice.taken), model_version, now, now + lease_seconds),
                )
                note_batch(connection, version, batch_id)
                return Reservation(batch_id, run_id, tuple(choice.taken), model_version, now + lease_seconds)

    def _reject(
        self,
        connection: sqlite3.Connection,
        version: int,
        rejected: list[tuple[str, str, str]],
        run_id: str,
        batch_id: str,
        now: float,
    ) -> None:
        if not rejected:
            return
        moment = datetime.fromtimestamp(now, UTC)
        rows = [
            {
                "experience_id": experience_id, "verdict": "reject", "operator": "reader", "reason": reason,
                "detail": detail, "pass_id": batch_id, "run_id": run_id, "decided_at": moment,
            }
            for experience_id, reason, detail in rejected
        ]  # fmt: skip
        staged = self._appender.stage({"decisions": pa.Table.from_pylist(rows, schema=DECISIONS.schema)})
        fresh = self._appender.select_new(connection, staged)
        frames = self._appender.write(fresh, may_roll=False)
        self._appender.record(connection, version, fresh, frames)


def free(connection: sqlite3.Connection, batch_id: str) -> None:
    """Give a batch's rows back, inside the caller's transaction."""
    connection.execute("UPDATE index_rollouts SET reserved_by = NULL WHERE reserved_by = ?", (batch_id,))
    connection.execute("UPDATE batches SET status = 'released' WHERE batch_id = ?", (batch_id,))


def reserved_rows(connection: sqlite3.Connection, batch_id: str) -> tuple[str, ...]:
    """Rows that a batch holds, in reading order."""
    found = connection.execute(
        "SELECT experience_id FROM index_rollouts WHERE reserved_by = ? "
        "ORDER BY group_first, group_id, sample_index, attempt, turn_index, sequence",
        (batch_id,),
    )
    return tuple(row[0] for row in found)


def _free_expired(connection: sqlite3.Connection, now: float) -> list[str]:
    expired = connection.execute(
        "SELECT batch_id FROM batches WHERE status = 'reserved' AND expires_at <= ?", (now,)
    ).fetchall()
    for (batch_id,) in expired:
        free(connection, batch_id)
    return [batch_id for (batch_id,) in expired]


def _held_by(
    connection: sqlite3.Connection, batch_id: str, run_id: str, model_version: int, freed: list[str]
) -> tuple[str, ...]:
    """Rows of a live reservation of this very batch; empty when there is none to continue.

    A reservation for other weights is given back and its id added to `freed`.
    """
    found = connection.execute(
        "SELECT run_id, status, step, model_version FROM batches WHERE batch_id = ?", (batch_id,)
    ).fetchone()
    if found is None:
        return ()
    owner, status, step, version = found
    if owner != run_id:
        raise StoreError(f"batch {batch_id!r} belongs to run {owner!r}, not {run_id!r}; batch ids name one batch")
    if status in ("prepared", "committed") or step is not None:
        raise StoreError(
            f"batch {batch_id!r} is {status} and has a manifest for step {step}; "
            "replay or release it, and reserve under a new id"
        )
    if status == "reserved" and version == model_version:
        return reserved_rows(connection, batch_id)
    if status == "reserved":
        free(connection, batch_id)
        freed.append(batch_id)
    return ()


def _choose(connection: sqlite3.Connection, policy: ReadPolicy, run_id: str, model_version: int) -> _Choice:
    choice = _Choice()
    seen: set[str] = set()
    for _, group_id in _candidates(connection, run_id, policy.max_uses):
        if group_id in seen:
            continue
        seen.add(group_id)
        rows = _group(connection, run_id, group_id)
        ready, refused = _judge(rows, policy, model_version)
        choice.rejected += refused
        if len(choice.taken) + len(ready) > policy.rows:
            if not choice.taken:
                raise StoreError(
                    f"group {group_id!r} has {len(ready)} rows to train and a batch takes at most rows={policy.rows}; "
                    "groups are taken whole: raise the reader's rows"
                )
            break
        choice.taken += ready
        if len(choice.taken) == policy.rows:
            break
    return choice


def _candidates(connection: sqlite3.Connection, run_id: str, max_uses: int) -> Iterator[tuple[int, str]]:
    # one ordered walk per number of uses keeps each on its index; merging them keeps the order of arrival
    walks = [
        connection.execute(
            "SELECT group_first, group_id FROM index_rollouts WHERE run_id = ? AND partition = 'train' "
            "AND uses = ? AND status = 'kept' ORDER BY group_first, group_id",
            (run_id, uses),
        )
        for uses in range(max_uses)
    ]
    return iter(heapq.merge(*walks))


def _group(connection: sqlite3.Connection, run_id: str, group_id: str) -> list[_Row]:
    found = connection.execute(
        "SELECT experience_id, status, uses, reserved_by, failed, group_size, sample_index, model_version "
        "FROM index_rollouts WHERE run_id = ? AND group_id = ? AND partition = 'train' "
        "ORDER BY sample_index, attempt, turn_index, sequence",
        (run_id, group_id),
    )
    return [_Row(*row) for row in found]


def _judge(rows: list[_Row], policy: ReadPolicy, model_version: int) -> tuple[list[str], list[tuple[str, str, str]]]:
    """The rows of a group to train now, and those to reject; both empty when it has to wait."""
    kept = [row for row in rows if row.status == "kept"]
    if any(row.status in ("new", "held") for row in rows) or any(row.reserved_by is not None for row in kept):
        return [], []
    able = [row for row in kept if not row.failed and row.uses < policy.max_uses]
    present, size = len({row.sample_index for row in rows}), max(row.group_size for row in rows)
    if present < size and policy.incomplete == "wait":
        return [], []
    if present < size and policy.incomplete == "drop":
        return [], [(row.experience_id, "incomplete", f"{present} of {size} siblings") for row in able]
    versions = [row.model_version for row in able if row.model_version is not None]
    if policy.max_staleness is not None and versions and model_version - min(versions) > policy.max_staleness:
        detail = f"token version {min(versions)}, weights {model_version}, limit {policy.max_staleness}"
        # a row that has trained already was used, not discarded: it is only not taken again
        return [], [(row.experience_id, "stale", detail) for row in able if row.uses == 0]
    return [row.experience_id for row in able], []
