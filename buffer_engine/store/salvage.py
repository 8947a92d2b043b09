"""What a damaged catalog still gives, table by table; what cannot be read is left out and said.

The damaged file is never written to: SQLite works on a copy, because replaying a write-ahead log changes the file.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from buffer_engine.store.ddl import APPLICATION_ID

Row = tuple[object, ...]

_COLUMNS: dict[str, tuple[tuple[str, ...], str]] = {
    "segments": (("segment_id", "tbl", "name"), "segment_id"),
    "frames": (("frame_id", "tbl", "segment_id", "offset", "length", "rows", "version", "xxh3"), "frame_id"),
    "cursors": (("name", "value"), "name"),
    "batches": (
        ("batch_id", "run_id", "status", "step", "rows", "model_version", "reserved_at", "committed_at"),
        "batch_id",
    ),
    "batch_history": (("entry", "batch_id", "status", "step"), "entry"),
}
"""Columns that a rebuilt catalog can use, and the one that each table is read in order of."""


@dataclass(frozen=True, slots=True)
class Salvaged:
    """Rows of the catalog's tables that could be read.

    Attributes:
        rows: by table, in the order of `_COLUMNS`; values are as SQLite gave them and may be nonsense.
        problems: by table, why some of its rows are missing; a table that is not named was read to its end.
    """

    rows: dict[str, list[Row]]
    problems: dict[str, str]

    @property
    def anything(self) -> bool:
        """Whether a single row came out of it."""
        return any(self.rows.values())


def salvage(catalog: Path) -> Salvaged:
    """Read what can be read of the catalog at this path, with its write-ahead log; a missing file gives nothing."""
    if not catalog.exists():
        missing = f"{catalog.name} is missing"
        return Salvaged({name: [] for name in _COLUMNS}, dict.fromkeys(_COLUMNS, missing))
    rows: dict[str, list[Row]] = {}
    problems: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="salvage-") as scratch:
        copy = Path(scratch, catalog.name)
        for end in ("", "-wal"):
            source = catalog.with_name(catalog.name + end)
            if source.exists():
                shutil.copyfile(source, copy.with_name(copy.name + end))
        with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
            connection.text_factory = _text
            wrong = _whole_problems(connection)
            for name, (columns, order) in _COLUMNS.items():
                rows[name], problem = _read(connection, name, columns, order)
                if problem or wrong:
                    problems[name] = problem or wrong
    return Salvaged(rows, problems)


def _whole_problems(connection: sqlite3.Connection) -> str:
    """Why no table of the file can be taken for whole; empty when SQLite finds nothing wrong with it."""
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        return str(error)
    if application != APPLICATION_ID:
        return f"application id {application:#x}, expected {APPLICATION_ID:#x}"
    return "" if found == "ok" else " ".join(str(found).split())


def _read(connection: sqlite3.Connection, name: str, columns: tuple[str, ...], order: str) -> tuple[list[Row], str]:
    """Rows from the front up to the first unreadable page, and from the back down to the last one."""
    query = f"SELECT {', '.join(columns)} FROM {name} ORDER BY {order}"
    front, problem = _until_error(connection, query)
    if not problem:
        return front, ""
    back, _ = _until_error(connection, query + " DESC")
    key = columns.index(order)
    known = {row[key] for row in front}
    return front + [row for row in reversed(back) if row[key] not in known], problem


def _until_error(connection: sqlite3.Connection, query: str) -> tuple[list[Row], str]:
    rows: list[Row] = []
    try:
        for row in connection.execute(query):
            rows.append(row)  # noqa: PERF402 - what was read before an error counts
    except sqlite3.DatabaseError as error:
        return rows, str(error)
    return rows, ""


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
