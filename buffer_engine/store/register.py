"""Putting a damaged frame aside and taking a repaired one back: each one catalog transaction with its record.

The rollouts of a damaged frame are rejected by verdicts of operator `store`, so that no batch takes them and everybody
can see why. When the frame is sound again, those verdicts are undone by new ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

import pyarrow as pa

from buffer_engine.schema import DECISIONS, EVENTS
from buffer_engine.store.append import Appender
from buffer_engine.store.catalog import Catalog, current_version, next_version
from buffer_engine.store.connection import Connection
from buffer_engine.store.index import STATUS_OF_VERDICT
from buffer_engine.store.reading import Frame
from buffer_engine.store.segments import FrameWriter

_RESTORED = {"kept": "keep", "held": "hold", "new": "release"}
"""Verdict that brings a status back."""

ReadDecisions = Callable[[Connection, Sequence[str]], pa.Table]
"""Readable verdicts about rollouts, in order of commit."""


class Register:
    """The list of damaged frames of one store, for writing."""

    def __init__(self, catalog: Catalog, appender: Appender, writer: FrameWriter) -> None:
        self._catalog = catalog
        self._appender = appender
        self._writer = writer

    def put(self, frame: Frame, message: str) -> bool:
        """List a frame, reject its rollouts, note it in `events`; False when it is listed already.

        Raises:
            StoreError: the store is read-only or the disk is full; nothing was changed.
        """
        with self._catalog.lock:
            self._writer.ensure("events")  # a new segment needs a transaction of its own
            self._writer.ensure("decisions")
            with self._catalog.transaction("put a damaged frame into quarantine") as connection:
                known = connection.execute("SELECT 1 FROM quarantine WHERE frame_id = ?", (frame.frame_id,)).fetchone()
                if known is not None:
                    return False
                version, now = next_version(connection), time.time()
                connection.execute("INSERT INTO quarantine VALUES (?, ?, ?)", (frame.frame_id, now, message))
                rejected = _rows_in(connection, frame, "status <> 'rejected'")
                connection.execute(
                    "INSERT INTO quarantined_rollouts SELECT sequence, frame_id FROM index_rollouts "
                    "WHERE frame_id = ? AND status <> 'rejected'",
                    (frame.frame_id if frame.table == "rollouts" else None,),
                )
                pass_id = f"quarantine/{frame.frame_id}/{version}"
                verdicts = [(one, run, "reject", f"was {status}") for one, run, status in rejected]
                self._append(
                    connection,
                    version,
                    _events(connection, frame, "damaged_frame", message, now),
                    _verdicts(verdicts, "damaged", pass_id, now),
                )
                return True

    def release(self, frame: Frame, read_decisions: ReadDecisions) -> bool:
        """Take a sound frame off the list and undo the verdicts; False when it was not listed.

        Raises:
            StoreError: the store is read-only or the disk is full; nothing was changed.
        """
        with self._catalog.lock:
            self._writer.ensure("events")
            self._writer.ensure("decisions")
            while True:
                seen = current_version(self._catalog.read())
                back = self._verdicts_before(self._catalog.read(), frame, read_decisions)
                with self._catalog.transaction("take a frame out of quarantine") as connection:
                    if current_version(connection) != seen:  # perhaps a verdict about these rows
                        continue
                    if not connection.execute("DELETE FROM quarantine WHERE frame_id = ?", (frame.frame_id,)).rowcount:
                        return False
                    version, now = next_version(connection), time.time()
                    connection.execute("DELETE FROM quarantined_rollouts WHERE frame_id = ?", (frame.frame_id,))
                    self._append(
                        connection,
                        version,
                        _events(connection, frame, "frame_restored", "its bytes are sound again", now),
                        _verdicts(back, "restored", f"recheck/{frame.frame_id}/{version}", now),
                    )
                    _read_again(connection, frame)
                    break
        return True

    def _verdicts_before(
        self, connection: Connection, frame: Frame, read_decisions: ReadDecisions
    ) -> list[tuple[str, str, str, str]]:
        """(rollout, run, verdict, detail) that undo the store's own rejections, where no later verdict came."""
        runs = {one: run for one, run, _ in _rows_in(connection, frame, "status = 'rejected'")}
        decisions = read_decisions(connection, list(runs))
        # the last final verdict of each row, and the one before the store's
        last: dict[str, tuple[str, str]] = {}
        before: dict[str, str] = {}
        columns = (decisions.column(name).to_pylist() for name in ("experience_id", "verdict", "operator", "reason"))
        for one, verdict, operator, reason in zip(*columns, strict=True):
            if verdict not in STATUS_OF_VERDICT:
                continue
            if (operator, reason) == ("store", "damaged"):
                before[one] = STATUS_OF_VERDICT[last[one][0]] if one in last else "new"
            last[one] = (verdict, reason)
        return [
            (one, runs[one], _RESTORED[status], f"{status} again")
            for one, status in before.items()
            if last[one] == ("reject", "damaged") and status in _RESTORED
        ]

    def _append(self, connection: Connection, version: int, events: pa.Table, decisions: pa.Table) -> None:
        given = {name: rows for name, rows in (("events", events), ("decisions", decisions)) if rows.num_rows}
        fresh = self._appender.select_new(connection, self._appender.stage(given))
        self._appender.record(connection, version, fresh, self._appender.write(fresh, may_roll=False))


def _rows_in(connection: Connection, frame: Frame, where: str) -> list[tuple[str, str, str]]:
    if frame.table != "rollouts":
        return []
    return connection.execute(
        f"SELECT experience_id, run_id, status FROM index_rollouts WHERE frame_id = ? AND {where} ORDER BY sequence",
        (frame.frame_id,),
    ).fetchall()


def _events(connection: Connection, frame: Frame, kind: str, message: str, now: float) -> pa.Table:
    """One event for each run that may miss rows."""
    if frame.table == "rollouts":
        query = "SELECT run_id, count(*) FROM index_rollouts WHERE frame_id = ? GROUP BY run_id ORDER BY run_id"
        runs: Mapping[str, int] = dict(connection.execute(query, (frame.frame_id,)).fetchall())
    else:  # whose rows they are is written in them
        runs = {row[0]: frame.rows for row in connection.execute("SELECT run_id FROM runs ORDER BY run_id")}
    where = f"{frame.table}, segments/{frame.segment}, offset {frame.offset}, {frame.rows} rows"
    rows = [
        {
            "run_id": run_id, "step": None, "kind": kind, "count": count, "experience_id": None,
            "detail": f"{where}: {message}", "recorded_at": datetime.fromtimestamp(now, UTC),
        }
        for run_id, count in runs.items()
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=EVENTS.schema)


def _verdicts(rows: Sequence[tuple[str, str, str, str]], reason: str, pass_id: str, now: float) -> pa.Table:
    given = [
        {
            "experience_id": one, "verdict": verdict, "operator": "store", "reason": reason, "detail": detail,
            "pass_id": pass_id, "run_id": run_id, "decided_at": datetime.fromtimestamp(now, UTC),
        }
        for one, run_id, verdict, detail in rows
    ]  # fmt: skip
    return pa.Table.from_pylist(given, schema=DECISIONS.schema)


def _read_again(connection: Connection, frame: Frame) -> None:
    """Have policies read a frame of a narrow table that they passed over."""
    known = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'reader_sources'").fetchone()
    if known is not None:
        connection.execute(
            "UPDATE reader_sources SET version = ? WHERE name = ? AND version >= ?",
            (frame.version - 1, frame.table, frame.version),
        )
