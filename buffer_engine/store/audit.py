"""The catalog against itself: what two of its tables say alike, and what can only be in one order.

SQLite keeps no checksums, so a bit that flips in its file is noticed only where it contradicts something. These checks
compare everything that is there twice. Not covered, because it is there once: values of cursors, when a reservation
expires, and a version that moved up.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import groupby

from buffer_engine.schema import TABLES
from buffer_engine.store.base import Finding
from buffer_engine.store.catalog import current_version
from buffer_engine.store.connection import Connection
from buffer_engine.store.ddl import catalog_ddl

_NEXT = {
    None: {"reserved", "prepared", "committed", "released"},
    "reserved": {"reserved", "prepared", "released"},
    "prepared": {"committed", "released"},
    "released": {"reserved", "released"},
    "committed": set[str](),
}
"""Turns that a batch can take; a recovered store begins with what was known."""


def shape_findings(connection: Connection) -> Iterator[Finding]:
    """Tables, columns and indexes that differ from those of a new catalog; what readers made beside them is theirs."""
    with closing(sqlite3.connect(":memory:")) as fresh:
        for statement in catalog_ddl():
            fresh.execute(statement)
        wanted, found = _shape(fresh), _shape(connection)
    for name, shape in wanted.items():
        if found.get(name) != shape:
            said = "it is missing" if name not in found else f"it is {found[name]}, expected {shape}"
            yield Finding("catalog", f"catalog.sqlite, {name}", said)


def _shape(connection: Connection) -> dict[str, list[tuple[object, ...]]]:
    shape: dict[str, list[tuple[object, ...]]] = {}
    for kind, name, table in connection.execute("SELECT type, name, tbl_name FROM sqlite_master").fetchall():
        if kind == "table":
            shape[name] = [row[1:] for row in connection.execute("SELECT * FROM pragma_table_info(?)", (name,))]
        elif kind == "index":
            columns = [row[1:] for row in connection.execute("SELECT * FROM pragma_index_xinfo(?)", (name,))]
            listed = connection.execute(
                'SELECT "unique", origin, partial FROM pragma_index_list(?) WHERE name = ?', (table, name)
            ).fetchall()
            shape[name] = [(table, *listed), *columns]
    return shape


def catalog_findings(connection: Connection) -> Iterator[Finding]:
    """Contradictions between the catalog's own tables."""
    yield from _frames(connection)
    yield from _sequences(connection)
    yield from _turns(connection)
    yield from _reservations(connection)


def _frames(connection: Connection) -> Iterator[Finding]:
    version = current_version(connection)
    before = 0
    found = connection.execute(
        "SELECT f.frame_id, f.tbl, f.version, s.tbl, s.name, s.retired_at FROM frames f "
        "LEFT JOIN segments s ON s.segment_id = f.segment_id ORDER BY f.frame_id"
    )
    for frame_id, table, at, other, name, retired_at in found:
        where = f"frame {frame_id}"
        if table not in TABLES:
            yield Finding("catalog", where, f"it is of table {table!r}, which does not exist")
        elif other is not None and other != table:
            yield Finding("catalog", where, f"it is of {table}, its segment {name} of {other}")
        if not before <= at <= version:
            yield Finding("catalog", where, f"its version is {at}; the one before has {before}, the catalog {version}")
        if retired_at is not None:
            yield Finding("catalog", where, f"it lies in {name}, which is to be removed")
        before = max(before, at) if at <= version else before
    for name, table, form, writer in connection.execute("SELECT name, tbl, format, writer FROM segments").fetchall():
        if not name.startswith(f"{table}/{writer}-") or form not in ("arrows", "parquet"):
            yield Finding("catalog", f"segments/{name}", f"it is listed as {form!r} of table {table!r} by {writer!r}")


def _sequences(connection: Connection) -> Iterator[Finding]:
    """Rollouts are numbered from 1 in the order of their frames; a group's first number is its smallest."""
    found = connection.execute(
        "SELECT experience_id, sequence, place FROM (SELECT experience_id, sequence, "
        "row_number() OVER (ORDER BY frame_id, row) AS place FROM index_rollouts) AS numbered WHERE sequence <> place"
    )
    for one, sequence, place in found.fetchall():
        yield Finding("catalog", one, f"it is number {sequence} in the order of arrival, its place is {place}")
    found = connection.execute(
        "SELECT run_id, group_id, min(sequence), min(group_first) FROM index_rollouts GROUP BY run_id, group_id "
        "HAVING min(sequence) <> min(group_first)"
    )
    for run_id, group_id, first, said in found.fetchall():
        yield Finding("catalog", f"{run_id}/{group_id}", f"its first row is number {first}, the rows say {said}")


def _turns(connection: Connection) -> Iterator[Finding]:
    """What became of each batch, and that its present state is its last turn."""
    version = current_version(connection)
    now = {
        row[0]: row[1:]
        for row in connection.execute(
            "SELECT batch_id, run_id, status, step, rows, reserved_at, committed_at FROM batches"
        )
    }
    history = connection.execute(
        "SELECT batch_id, run_id, status, step, rows, reserved_at, committed_at, version, held FROM batch_history "
        "ORDER BY batch_id, entry"
    ).fetchall()
    told: set[str] = set()
    for batch_id, turns in groupby(history, key=lambda row: row[0]):
        told.add(batch_id)
        before: tuple[object, ...] | None = None
        status: str | None = None
        at = 0
        for _, *turn, when, held in turns:
            if turn[1] not in _NEXT[status]:
                yield Finding("catalog", str(batch_id), f"its history says {turn[1]!r} after {status or 'nothing'}")
            if before is not None and turn[1] in ("prepared", "committed"):
                same = (0, 4) if turn[1] == "prepared" else (0, 2, 3, 4)  # run and time; then step and rows too
                if any(turn[place] != before[place] for place in same):
                    yield Finding("catalog", str(batch_id), f"two turns of it disagree: {before} and {tuple(turn)}")
            if not at <= when <= version:
                yield Finding("catalog", str(batch_id), f"it changed at version {when}, after {at} and by {version}")
            if not _places(held, reserved=turn[1] == "reserved"):
                yield Finding("catalog", str(batch_id), f"its history says that it held {held!r}")
            before, at = tuple(turn), max(at, when)
            status = turn[1] if turn[1] in _NEXT else status
        if now.get(batch_id) != before:
            yield Finding("catalog", str(batch_id), f"it is {now.get(batch_id)}, its last turn was {before}")
    for batch_id in sorted(now.keys() - told):
        yield Finding("catalog", str(batch_id), "the catalog has it, and no turn that it took")


def _places(held: object, *, reserved: bool) -> bool:
    if held is None or not reserved:
        return held is None and not reserved
    try:
        places = json.loads(str(held))
    except ValueError:
        return False
    return isinstance(places, list) and all(isinstance(place, int) for place in places)  # pyright: ignore[reportUnknownVariableType]


def _reservations(connection: Connection) -> Iterator[Finding]:
    found = connection.execute("SELECT batch_id, reserved_at, expires_at FROM batches WHERE expires_at < reserved_at")
    for batch_id, reserved_at, expires_at in found.fetchall():
        yield Finding("catalog", batch_id, f"it expires at {expires_at}, before it was reserved at {reserved_at}")
    for name, value in connection.execute("SELECT name, value FROM cursors").fetchall():
        if not isinstance(name, str) or not isinstance(value, int):
            yield Finding("catalog", "cursors", f"cursor {name!r} has the value {value!r}")
    unknown = connection.execute(
        "SELECT DISTINCT run_id FROM index_rollouts WHERE run_id NOT IN (SELECT run_id FROM runs)"
    )
    for (run_id,) in unknown.fetchall():
        yield Finding("catalog", "runs", f"rollouts are of run {run_id!r}, which is not listed")
    stray = connection.execute("SELECT run_id FROM runs WHERE run_id NOT IN (SELECT run_id FROM index_rollouts)")
    for (run_id,) in stray.fetchall():
        yield Finding("catalog", "runs", f"run {run_id!r} is listed and has no rollout")
