"""What was known at an earlier version: the state of batches, and of rollouts as it follows from it.

The catalog's columns `status`, `uses` and `reserved_by` are those of now. Verdicts and manifests are append-only, so
only the turns that batches took have to be noted: one line per turn, with the version that made it visible.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.schema import ROLLOUT_STATE
from buffer_engine.store.base import BatchStatus
from buffer_engine.store.connection import Connection
from buffer_engine.store.index import STATUS_OF_VERDICT


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """A batch as it was from a version on.

    Attributes:
        held: places in the order of arrival (`sequence`) of the rows that a reservation without a manifest held.
    """

    version: int
    batch_id: str
    run_id: str
    status: BatchStatus
    step: int | None
    rows: int
    reserved_at: float
    committed_at: float | None
    held: tuple[int, ...]


def note_batch(connection: Connection, version: int, *batch_ids: str) -> None:
    """Note the present state of batches, inside the transaction that changed it and will be `version`."""
    connection.executemany(
        "INSERT INTO batch_history (version, batch_id, run_id, status, step, rows, reserved_at, committed_at, held) "
        "SELECT ?, batch_id, run_id, status, step, rows, reserved_at, committed_at, CASE status WHEN 'reserved' THEN "
        "(SELECT json_group_array(sequence) FROM index_rollouts WHERE reserved_by = batch_id) END "
        "FROM batches WHERE batch_id = ?",
        [(version, batch_id) for batch_id in batch_ids],
    )


def entries(connection: Connection, *, until: int) -> list[BatchEntry]:
    """Every turn that a batch took up to version `until`, in order."""
    found = connection.execute(
        "SELECT version, batch_id, run_id, status, step, rows, reserved_at, committed_at, held FROM batch_history "
        "WHERE version <= ? ORDER BY entry",
        (until,),
    )
    return [BatchEntry(*row[:-1], held=tuple(json.loads(row[-1] or "[]"))) for row in found]


def latest(history: Iterable[BatchEntry]) -> list[BatchEntry]:
    """The last turn of every batch."""
    return list({entry.batch_id: entry for entry in history}.values())


def rollout_state_at(
    now: pa.Table, *, rollouts: pa.Table, decisions: pa.Table, batch_rows: pa.Table, batches: Sequence[BatchEntry]
) -> pa.Table:
    """`schema.ROLLOUT_STATE` as of a version.

    Args:
        now: the state of today, for the order of arrival.
        rollouts, decisions, batch_rows: the tables as of the version (ids, verdicts, rows of manifests).
        batches: what batches went through up to the version.
    """
    known = now.filter(pc.is_in(now.column("experience_id"), value_set=_one(rollouts.column("experience_id"))))
    ids = known.column("experience_id")
    committed = [entry for entry in batches if entry.status == "committed"]
    uses, steps = _trainings(batch_rows, committed)
    columns = {
        "experience_id": ids,
        "sequence": known.column("sequence"),
        "status": pc.fill_null(_look_up(ids, _last_verdicts(decisions)), "new"),
        "uses": pc.fill_null(_look_up(ids, uses), 0),
        "reserved_by": _holders(known, batch_rows, latest(batches)),
        "trained_step": _look_up(ids, steps),
    }
    arrays = [columns[field.name].cast(field.type) for field in ROLLOUT_STATE]
    return pa.table(arrays, schema=ROLLOUT_STATE)


def _last_verdicts(decisions: pa.Table) -> pa.Table:
    verdicts = pa.array(list(STATUS_OF_VERDICT))
    final = decisions.filter(pc.is_in(decisions.column("verdict"), value_set=verdicts))
    # One thread: `last` is about the order of commit.
    last = final.group_by("experience_id", use_threads=False).aggregate([("verdict", "last")])
    places = pc.index_in(last.column("verdict_last"), value_set=verdicts)
    return _pairs(last.column("experience_id"), pa.array(list(STATUS_OF_VERDICT.values())).take(_one(places)))


def _trainings(batch_rows: pa.Table, committed: Sequence[BatchEntry]) -> tuple[pa.Table, pa.Table]:
    """(id, committed batches that hold the row) and (id, step of the last of them)."""
    names = pa.array([entry.batch_id for entry in committed], pa.string())
    rows = batch_rows.append_column("turn", pc.index_in(batch_rows.column("batch_id"), value_set=names))
    rows = rows.filter(rows.column("turn").is_valid())
    grouped = rows.group_by("experience_id").aggregate([("turn", "count"), ("turn", "max")])
    steps = pa.array([entry.step for entry in committed], pa.int64())
    ids = grouped.column("experience_id")
    return _pairs(ids, grouped.column("turn_count")), _pairs(ids, steps.take(_one(grouped.column("turn_max"))))


def _holders(known: pa.Table, batch_rows: pa.Table, standing: Sequence[BatchEntry]) -> pa.ChunkedArray:
    """The batch that held each row: by its manifest, or while there was none by what was noted."""
    prepared = pa.array([entry.batch_id for entry in standing if entry.status == "prepared"], pa.string())
    rows = batch_rows.filter(pc.is_in(batch_rows.column("batch_id"), value_set=prepared))
    by_manifest = _look_up(known.column("experience_id"), _pairs(rows.column("experience_id"), rows.column("batch_id")))
    held = [(place, entry.batch_id) for entry in standing if entry.status == "reserved" for place in entry.held]
    places = pa.array([place for place, _ in held], pa.int64())
    names = pa.array([name for _, name in held], pa.string())
    return pc.coalesce(by_manifest, _look_up(known.column("sequence"), _pairs(places, names)))


def _pairs(keys: pa.ChunkedArray | pa.Array, values: pa.ChunkedArray | pa.Array) -> pa.Table:
    return pa.table({"key": keys, "value": values})


def _look_up(keys: pa.ChunkedArray, pairs: pa.Table) -> pa.ChunkedArray:
    """The value of each key; null where `pairs` has none."""
    places = pc.index_in(keys, value_set=_one(pairs.column("key")))
    return pairs.column("value").take(places)


def _one(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)
