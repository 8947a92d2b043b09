"""Experiences of Trinity-RFT's SQLite tables as tasks, rollouts and scores.

Rows are read by column and payload by `trinity_payload`; nothing of them is ever run. One experience is one rollout, a
preference pair two. What has no place here (advantages, returns, teacher log-probabilities, images) is counted and
told.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from buffer_engine import schema
from buffer_engine.errors import UsageError, did_you_mean
from buffer_engine.exchange.incoming import Importer, ImportReceipt
from buffer_engine.exchange.json_rows import Bad
from buffer_engine.exchange.pickle_tree import UnreadablePickle
from buffer_engine.exchange.sources import Chunk
from buffer_engine.exchange.trinity_payload import Payload, read_payload
from buffer_engine.exchange.trinity_rows import Grouping, NotARow, Target, TrinityRow, to_rows
from buffer_engine.store.base import Partition

_BLOB = "experience_bytes"
_OPTIONAL = ("timestamp", "task_id", "run_id", "msg_id", "model_version", "reward")
CHUNK_ROWS = 256


@dataclass(frozen=True, slots=True)
class TrinityTable:
    """A table of experiences: its columns, and the table that has the payload when that is another one."""

    name: str
    columns: tuple[str, ...]
    blobs: str | None

    def query(self) -> str:
        """SELECT of id, payload and those of the optional columns that are there."""
        rest = "".join(f", m.{_quoted(name)}" for name in _OPTIONAL if name in self.columns)
        if self.blobs is None:
            return f"SELECT m.id, m.{_BLOB}{rest} FROM {_quoted(self.name)} m ORDER BY m.id"
        return (
            f"SELECT m.id, b.{_BLOB}{rest} FROM {_quoted(self.name)} m LEFT JOIN {_quoted(self.blobs)} b "
            "ON b.id = m.id ORDER BY m.id"
        )


def import_trinity(
    importer: Importer, source: Path, *, table: str | None, run_id: str, taskset: str, partition: Partition
) -> tuple[ImportReceipt, list[str]]:
    """Import one table of a database; what was done, and a line for everything that was left behind.

    Args:
        table: name of the table; None: the only one that holds experiences.
        run_id: run that the rollouts become part of; ids follow from it, so another run makes other rows.
        taskset: task set of the tasks made from the prompts.
    Raises:
        UsageError: the file is no database of Trinity-RFT, or has several tables and none is named.
        ExchangeError: with `refuse`, rows cannot be read or do not fit.
    """
    if not source.is_file():
        raise UsageError(f"{source}: there is no such file")
    uri = f"file:{quote(str(source.absolute()))}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as database:
        try:
            database.execute("PRAGMA trusted_schema = OFF")
            found = _chosen(source, find_tables(database), table)
            target = Target(found.name, run_id, taskset, partition)
            grouping = Grouping(target)
            for _, row in _rows(source, database, found):
                if isinstance(row, TrinityRow):
                    grouping.see(row)
            left = Counter[str]()

            def read() -> Iterator[Mapping[str, Chunk]]:
                left.clear()
                rows = _rows(source, database, found)
                while part := list(islice(rows, CHUNK_ROWS)):
                    yield _tables(part, grouping, left)

            with open(source, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()[:32]
            receipt = importer.take_rows(str(source), f"{found.name}/{digest}", read)
        except sqlite3.DatabaseError as error:
            raise UsageError(f"{source}: cannot be read as a SQLite database ({error})") from error
    return receipt, [f"not imported: {what} of {count:,} rows" for what, count in sorted(left.items())]


def find_tables(database: sqlite3.Connection) -> list[TrinityTable]:
    """Tables with experiences, of the layout with payload inside or in a table beside."""
    names = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    columns = {name: tuple(row[1] for row in database.execute(f"PRAGMA table_info({_quoted(name)})")) for name in names}
    beside = {name for name in names if name.endswith("_blob") and set(columns[name]) == {"id", _BLOB}}
    found: list[TrinityTable] = []
    for name in names:
        if f"{name}_blob" in beside:
            found.append(TrinityTable(name, columns[name], f"{name}_blob"))
        elif _BLOB in columns[name] and "id" in columns[name] and name not in beside:
            found.append(TrinityTable(name, columns[name], None))
    return found


def _chosen(source: Path, found: list[TrinityTable], name: str | None) -> TrinityTable:
    names = [table.name for table in found]
    if not found:
        raise UsageError(f"{source}: no table of experiences here (none has a column {_BLOB})")
    if name is None:
        if len(found) > 1:
            raise UsageError(f"{source}: there are several tables of experiences: add --table {' | '.join(names)}")
        return found[0]
    if name not in names:
        raise UsageError(f"{source}: no table of experiences is named {name!r}: {did_you_mean(name, names)}")
    return found[names.index(name)]


def _rows(
    source: Path, database: sqlite3.Connection, table: TrinityTable
) -> Iterator[tuple[str, TrinityRow | NotARow]]:
    """Rows in order of id with where they stand; those that cannot be read with the reason."""
    cursor = database.execute(table.query())
    names = [column[0] for column in cursor.description][2:]
    for number, blob, *rest in cursor:
        where = f"{source}: {table.name} id {number}"
        if not isinstance(blob, bytes):
            yield where, NotARow("it has no payload")
            continue
        try:
            payload: Payload = read_payload(blob)
        except UnreadablePickle as error:
            yield where, NotARow(f"the payload cannot be read safely: {error}")
            continue
        yield where, TrinityRow(int(number), payload, dict(zip(names, rest, strict=True)))


def _tables(
    part: list[tuple[str, TrinityRow | NotARow]], grouping: Grouping, left: Counter[str]
) -> Mapping[str, Chunk]:
    rows: dict[str, list[dict[str, Any]]] = {"tasks": [], "rollouts": [], "scores": []}
    bad: list[Bad] = []
    for where, row in part:  # every experience is an object of its own
        if isinstance(row, NotARow):
            bad.append(Bad(where, str(row)))
            continue
        try:
            made = to_rows(row, grouping)
        except NotARow as error:
            bad.append(Bad(where, str(error)))
            continue
        for name in rows:
            rows[name] += made.tables[name]
        left.update(made.left)
    specs = {"tasks": schema.TASKS, "rollouts": schema.ROLLOUTS, "scores": schema.SCORES}
    tables = {name: pa.Table.from_pylist(rows[name], schema=specs[name].schema) for name in rows}
    return {
        name: Chunk(table, lambda at: str(at), tuple(bad) if name == "rollouts" else ())
        for name, table in tables.items()
    }


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
