"""The least that the loop can run on: what it needs of an `ExperienceStore`, in the memory of one process.

Its rows are gone when the process ends. It is what the store's share of a step is compared with, so it does nothing
that the loop does not need: no checks, no keys, no locks, no versions of the past, and of the read policies only `fifo`
with each row once.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.errors import StoreError
from buffer_engine.schema import BATCH_STATE, ROLLOUT_STATE
from buffer_engine.store.base import (
    AppendReceipt,
    BatchRecord,
    Finding,
    OnInvalid,
    ReadPolicy,
    Reservation,
    StoreInfo,
)
from buffer_engine.store.validate import table_spec

_STATUS_OF = {"keep": "kept", "reject": "rejected", "hold": "held", "release": "new"}


@dataclass(slots=True)
class _Row:
    """What is known about a rollout beside its content."""

    sequence: int
    part: int
    at: int
    run_id: str
    group_id: str
    group_size: int
    partition: str
    failed: bool
    status: str = "new"
    uses: int = 0
    reserved_by: str | None = None
    trained_step: int | None = None


class MemoryStore:
    """See `ExperienceStore`; what is not needed by the loop raises NotImplementedError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: dict[str, list[pa.Table]] = {}
        self._rows: dict[str, _Row] = {}
        self._groups: dict[str, list[str]] = {}
        self._about: dict[str, dict[str, list[tuple[int, int]]]] = {"scores": {}, "decisions": {}}
        self._cursors: dict[str, int] = {}
        self._batches: dict[str, BatchRecord] = {}
        self._version = 0

    @property
    def path(self) -> Path:
        """Folder of the run's other files."""
        return self._path

    def append(self, table: str, rows: pa.Table, *, cursors: Mapping[str, int] | None = None) -> AppendReceipt:
        """Keep the rows."""
        return self.append_all({table: rows}, cursors=cursors)

    def append_all(
        self,
        tables: Mapping[str, pa.Table],
        *,
        cursors: Mapping[str, int] | None = None,
        on_invalid: OnInvalid = "refuse_all",
    ) -> AppendReceipt:
        """Keep the rows of several tables and move cursors; nothing is looked at, so nothing is refused."""
        del on_invalid
        for name, rows in tables.items():
            schema = table_spec(name).schema
            columns = [
                rows.column(field.name) if field.name in rows.column_names else pa.nulls(rows.num_rows, field.type)
                for field in schema
            ]
            parts = self._parts.setdefault(name, [])
            parts.append(pa.table(columns, schema=schema).combine_chunks())
            self._note(name, len(parts) - 1, parts[-1])
        self._cursors.update(cursors or {})
        self._version += 1
        return AppendReceipt(self._version, {name: rows.num_rows for name, rows in tables.items()}, {})

    def cursor(self, name: str) -> int:
        """Value of a cursor."""
        return self._cursors.get(name, 0)

    def version(self) -> int:
        """Appends so far."""
        return self._version

    def scan(
        self, table: str, *, after: int = 0, until: int | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """All rows; the past is not kept."""
        if after or until is not None:
            raise NotImplementedError("the memory store knows no versions of the past")
        yield from self.table(table, columns=columns).to_batches()

    def table(self, name: str, *, until: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows; the past is not kept."""
        if until is not None:
            raise NotImplementedError("the memory store knows no versions of the past")
        parts = self._parts.get(name)
        whole = pa.concat_tables(parts) if parts else table_spec(name).schema.empty_table()
        return whole if columns is None else whole.select(list(columns))

    def fetch(self, experience_ids: Sequence[str], *, columns: Sequence[str] | None = None) -> pa.Table:
        """Rollouts in the order asked."""
        places = [(self._rows[one].part, self._rows[one].at) for one in experience_ids]
        return self._at("rollouts", places, columns)

    def narrow(self, table: str, ids: Sequence[str]) -> pa.Table:
        """Rows by the first column of their key, in the order of arrival."""
        if table not in self._about:
            whole = self.table(table)
            return whole.filter(pc.is_in(whole.column(table_spec(table).key[0]), value_set=pa.array(ids, pa.string())))
        about = self._about[table]
        return self._at(table, sorted(place for one in ids for place in about.get(one, ())), None)

    def runs_of(self, experience_ids: Sequence[str]) -> Mapping[str, str]:
        """Run of each stored rollout."""
        return {one: self._rows[one].run_id for one in experience_ids if one in self._rows}

    def rollout_state(
        self, *, run_id: str | None = None, status: str | None = None, until: int | None = None
    ) -> pa.Table:
        """Bookkeeping of rollouts, now."""
        if until is not None:
            raise NotImplementedError("the memory store knows no versions of the past")
        rows = [
            (name, row.sequence, row.status, row.uses, row.reserved_by, row.trained_step)
            for name, row in self._rows.items()
            if (run_id is None or row.run_id == run_id) and (status is None or row.status == status)
        ]
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(ROLLOUT_STATE)
        return pa.table([pa.array(c, f.type) for c, f in zip(columns, ROLLOUT_STATE, strict=True)], ROLLOUT_STATE)

    def batch_state(self, *, until: int | None = None) -> pa.Table:
        """State of batches; times are not kept."""
        if until is not None:
            raise NotImplementedError("the memory store knows no versions of the past")
        rows = [{"batch_id": b.batch_id, "run_id": b.run_id, "status": b.status, "step": b.step, "rows": b.rows,
                 "reserved_at": 0} for b in self._batches.values()]  # fmt: skip
        return pa.Table.from_pylist(rows, BATCH_STATE)

    @contextmanager
    def open_run(self, run_id: str) -> Generator[None]:
        """Nobody else can have it."""
        del run_id
        yield

    def reserve(
        self,
        policy: ReadPolicy,
        *,
        run_id: str,
        batch_id: str,
        model_version: int,
        lease_seconds: float = 3600.0,
    ) -> Reservation | None:
        """Whole ready groups in the order of arrival; nothing expires."""
        if policy.type != "fifo" or policy.max_uses != 1 or policy.incomplete != "wait":
            raise NotImplementedError("the memory store reads by fifo, each row once, whole groups")
        taken: list[str] = []
        for names in self._groups.values():
            rows = [self._rows[name] for name in names]
            ready = [
                name
                for name, row in zip(names, rows, strict=True)
                if row.status == "kept" and not row.failed and not row.uses and row.reserved_by is None
            ]
            usable = rows[0].run_id == run_id and rows[0].partition == "train" and len(rows) == rows[0].group_size
            if not ready or not usable or any(row.status in ("new", "held") for row in rows):
                continue
            if len(taken) + len(ready) > policy.rows:
                break
            taken += ready
        if len(taken) < policy.min_rows:
            return None
        for name in taken:
            self._rows[name].reserved_by = batch_id
        self._batches[batch_id] = BatchRecord(batch_id, run_id, "reserved", None, len(taken))
        return Reservation(batch_id, run_id, tuple(taken), model_version, time.time() + lease_seconds)

    def prepare_batch(self, reservation: Reservation, *, step: int, batch: pa.Table, rows: pa.Table) -> None:
        """Keep the manifest; rows that are not in it are free again."""
        self.append_all({"batches": batch, "batch_rows": rows})
        used = set(rows.column("experience_id").to_pylist())
        for name in reservation.experience_ids:
            if name not in used:
                self._rows[name].reserved_by = None
        before = self._batches[reservation.batch_id]
        self._batches[reservation.batch_id] = replace(before, status="prepared", step=step, rows=len(used))

    def commit_batch(
        self, batch_id: str, *, step: int, model: pa.Table | None = None, token_stats: pa.Table | None = None
    ) -> None:
        """Count its rows as trained."""
        for row in self._rows.values():
            if row.reserved_by == batch_id:
                row.reserved_by, row.uses, row.trained_step = None, row.uses + 1, step
        self._batches[batch_id] = replace(self._batches[batch_id], status="committed")
        given = {"models": model, "token_stats": token_stats}
        self.append_all({name: rows for name, rows in given.items() if rows is not None})

    def release(self, batch_id: str) -> None:
        """Free its rows."""
        for row in self._rows.values():
            if row.reserved_by == batch_id:
                row.reserved_by = None
        self._batches[batch_id] = replace(self._batches[batch_id], status="released")

    def batches(self, run_id: str) -> list[BatchRecord]:
        """By step; those not prepared come last."""
        of_run = [one for one in self._batches.values() if one.run_id == run_id]
        return sorted(of_run, key=lambda one: (one.step is None, one.step or 0))

    def verify(self) -> list[Finding]:
        """Nothing can be damaged."""
        return []

    def info(self) -> StoreInfo:
        """Not needed."""
        raise NotImplementedError("the memory store has no sizes")

    def close(self) -> None:
        """Nothing is open."""

    def _note(self, name: str, part: int, rows: pa.Table) -> None:
        if name == "rollouts":
            facts = ("experience_id", "run_id", "group_id", "group_size", "partition", "error")
            for at, fact in enumerate(zip(*(rows.column(one).to_pylist() for one in facts), strict=True)):
                experience_id, run_id, group_id, size, partition, error = fact
                if experience_id in self._rows:
                    raise StoreError(f"the memory store has rollout {experience_id!r} already")
                row = _Row(len(self._rows) + 1, part, at, run_id, group_id, size, partition, error is not None)
                self._rows[experience_id] = row
                self._groups.setdefault(group_id, []).append(experience_id)
        elif name in self._about:
            about = self._about[name]
            for at, experience_id in enumerate(rows.column("experience_id").to_pylist()):
                about.setdefault(experience_id, []).append((part, at))
        if name == "decisions":
            verdicts = zip(rows.column("experience_id").to_pylist(), rows.column("verdict").to_pylist(), strict=True)
            for experience_id, verdict in verdicts:
                if verdict in _STATUS_OF:
                    self._rows[experience_id].status = _STATUS_OF[verdict]

    def _at(self, name: str, places: Sequence[tuple[int, int]], columns: Sequence[str] | None) -> pa.Table:
        schema = table_spec(name).schema
        parts = self._parts.get(name, [])
        found: list[pa.Table] = []
        at = 0
        while at < len(places):
            part, end = places[at][0], at
            while end < len(places) and places[end][0] == part:
                end += 1
            rows = parts[part] if columns is None else parts[part].select(list(columns))
            found.append(rows.take([row for _, row in places[at:end]]))
            at = end
        if found:
            return pa.concat_tables(found)
        return (schema if columns is None else pa.schema([schema.field(one) for one in columns])).empty_table()
