"""Refusing single rows of an append while the good ones are stored.

What is wrong with one row (a value, a length, a key that is taken, a rollout that is not there) refuses that row. What
is wrong with the append (an unknown column, a column of another type, prompts in both partitions) refuses all of it.
Every refusal is in the receipt and, as an event, in the store: one transaction with the rows that were taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa

from buffer_engine.errors import KeyConflictError, RowError
from buffer_engine.schema import EVENTS, TableSpec
from buffer_engine.store import index
from buffer_engine.store.admission import ABOUT_ROLLOUTS
from buffer_engine.store.base import RefusedRow
from buffer_engine.store.connection import Connection
from buffer_engine.store.staging import Staged
from buffer_engine.store.validate import check_columns, conform, row_label

EVENT_KIND = "refused_row"
_Found = tuple[RefusedRow, str | None, str]
"""A refusal, the rollout that the row is or is about, and its run (empty: it says none)."""


class Refusals:
    """Rows of one append that are refused, collected on its way."""

    def __init__(self) -> None:
        self._unfit: list[_Found] = []
        self._looked_up: list[_Found] = []

    @property
    def rows(self) -> tuple[RefusedRow, ...]:
        """Everything refused so far."""
        return tuple(one for one, _, _ in (*self._unfit, *self._looked_up))

    def fitting(self, spec: TableSpec, rows: pa.Table) -> list[pa.RecordBatch]:
        """`conform`, with the rows left out that do not fit.

        Raises:
            SchemaError: what is wrong is not about single rows.
        """
        check_columns(spec, rows)
        bad = self._misfits(spec, rows, 0)
        if bad:
            keep = np.ones(rows.num_rows, dtype=np.bool_)
            keep[bad] = False
            rows = rows.filter(pa.array(keep))
        return conform(spec, rows)

    def begin(self) -> None:
        """Forget what the catalog said about the rows: it is asked again."""
        self._looked_up.clear()

    def conflict(self, error: KeyConflictError, part: Staged, row: int) -> None:
        """Refuse a row whose key is taken by other content."""
        self._looked_up.append(_found(part, row, error.label, error.field, error.reason))

    def twice(self, error: KeyConflictError, part: Staged, row: int) -> None:
        """Refuse a row whose key an earlier row of the append has, with other content."""
        self._unfit.append(_found(part, row, error.label, error.field, error.reason))

    def without_dangling(self, connection: Connection, staged: Sequence[Staged]) -> list[Staged]:
        """The parts without the rows about rollouts that are neither stored nor among them."""
        arriving = {key[0] for part in staged if part.spec.name == "rollouts" for key in part.keys}
        left: list[Staged] = []
        for part in staged:
            if part.spec.name in ABOUT_ROLLOUTS:
                about: list[str] = part.batch.column("experience_id").to_pylist()
                unknown = index.unknown_rollouts(connection, set(about) - arriving)
                for row, one in enumerate(about):
                    if one in unknown:
                        label = row_label(part.spec, part.batch, row)
                        reason = f"{one!r} is not a stored rollout"
                        self._looked_up.append(_found(part, row, label, "experience_id", reason))
                if unknown:
                    part = part.only([row for row, one in enumerate(about) if one not in unknown])
            if part.batch.num_rows:
                left.append(part)
        return left

    def events(self, run_id: str) -> Staged | None:
        """One event per refused row; None when there is none.

        Args:
            run_id: run of the rows that do not say theirs.
        """
        found = [*self._unfit, *self._looked_up]
        if not found:
            return None
        now = datetime.now(UTC)
        rows = [
            {
                "run_id": run or run_id, "step": None, "kind": EVENT_KIND, "count": 1, "experience_id": about,
                "detail": f"{one.table}: {one.key}: {one.field}: {one.reason}", "recorded_at": now,
            }
            for one, about, run in found
        ]  # fmt: skip
        (batch,) = pa.Table.from_pylist(rows, schema=EVENTS.schema).to_batches()
        return Staged(EVENTS, batch)

    def _misfits(self, spec: TableSpec, rows: pa.Table, first: int) -> list[int]:
        """Numbers of the rows that do not fit, counted from `first`."""
        try:
            conform(spec, rows)
        except RowError as error:
            if rows.num_rows == 1:
                key = error.label if error.has_key else f"row {first}"
                refused = RefusedRow(spec.name, key, error.field, error.reason)
                self._unfit.append((refused, _text(rows, "experience_id", 0), _text(rows, "run_id", 0) or ""))
                return [first]
        else:
            return []
        # halves: bad rows are few, and a look at many rows costs little more than a look at one
        half = rows.num_rows // 2
        return self._misfits(spec, rows.slice(0, half), first) + self._misfits(spec, rows.slice(half), first + half)


def run_of(tables: Sequence[pa.Table]) -> str:
    """The first run that rows of an append name; empty when none does."""
    for rows in tables:
        for at in range(rows.num_rows):
            run = _text(rows, "run_id", at)
            if run:
                return run
    return ""


def _found(part: Staged, row: int, label: str, field: str, reason: str) -> _Found:
    rows = pa.Table.from_batches([part.batch.slice(row, 1)])
    refused = RefusedRow(part.spec.name, label, field, reason)
    return refused, _text(rows, "experience_id", 0), _text(rows, "run_id", 0) or ""


def _text(rows: pa.Table, name: str, at: int) -> str | None:
    if rows.column_names.count(name) != 1:
        return None
    value = rows.column(name)[at].as_py()
    return value if isinstance(value, str) else None
