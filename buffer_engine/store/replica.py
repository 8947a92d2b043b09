"""Everything a store knows, out of its catalog and back into the catalog of another, version by version.

Rows alone do not make a store: what was reserved, trained and committed is bookkeeping beside them. A replica replays
every commit at the version that it had, so that `--as-of` means the same in both, and then puts the bookkeeping back.
What is derived (the index, statuses, which run a row belongs to, reading orders) follows from the replay; it is
compared, not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from buffer_engine.errors import StoreError
from buffer_engine.store.append import Appender
from buffer_engine.store.catalog import Catalog, current_version
from buffer_engine.store.connection import Connection
from buffer_engine.store.reading import SegmentReader, frames_of

_TEXT, _WHOLE, _REAL = pa.string(), pa.int64(), pa.float64()
STATE: dict[str, pa.Schema] = {
    "rollout_state": pa.schema(
        [
            ("experience_id", _TEXT), ("sequence", _WHOLE), ("status", _TEXT), ("uses", _WHOLE),
            ("reserved_by", _TEXT), ("trained_step", _WHOLE), ("failed", _WHOLE), ("content", pa.binary()),
        ]
    ),
    "batch_state": pa.schema(
        [
            ("batch_id", _TEXT), ("run_id", _TEXT), ("status", _TEXT), ("step", _WHOLE), ("rows", _WHOLE),
            ("model_version", _WHOLE), ("reserved_at", _REAL), ("expires_at", _REAL), ("committed_at", _REAL),
        ]
    ),
    "batch_history": pa.schema(
        [
            ("entry", _WHOLE), ("version", _WHOLE), ("batch_id", _TEXT), ("run_id", _TEXT), ("status", _TEXT),
            ("step", _WHOLE), ("rows", _WHOLE), ("reserved_at", _REAL), ("committed_at", _REAL), ("held", _TEXT),
        ]
    ),
    "cursors": pa.schema([("name", _TEXT), ("value", _WHOLE)]),
}  # fmt: skip
"""Bookkeeping by name; columns are those of the catalog."""

_SOURCES = {
    "rollout_state": ("index_rollouts", "sequence"),
    "batch_state": ("batches", "reserved_at, batch_id"),
    "batch_history": ("batch_history", "entry"),
    "cursors": ("cursors", "name"),
}


class Replica:
    """Everything of one store, to be read; or, of a store without a commit, to be filled."""

    def __init__(self, catalog: Catalog, reader: SegmentReader, appender: Appender) -> None:
        self._catalog = catalog
        self._reader = reader
        self._appender = appender

    def bookkeeping(self) -> dict[str, pa.Table]:
        """The catalog's state by the names of `STATE`."""
        tables: dict[str, pa.Table] = {}
        for name, schema in STATE.items():
            source, order = _SOURCES[name]
            query = f"SELECT {', '.join(schema.names)} FROM {source} ORDER BY {order}"
            rows = self._catalog.read().execute(query).fetchall()
            # Column by column: unpacking half a million rows into `zip` takes as long as reading them.
            columns = [[row[place] for row in rows] for place in range(len(schema))]
            arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
            tables[name] = pa.Table.from_arrays(arrays, schema=schema)
        return tables

    def commits(self, table: str) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Every batch of a table in the order of commit, with the version that committed it.

        Raises:
            CorruptSegmentError: rows are damaged; nothing is left out.
        """
        for frame in frames_of(self._catalog.read(), table):
            yield frame.version, self._reader.batch(frame)

    def replay(self, found: Iterable[tuple[int, Mapping[str, pa.Table]]]) -> None:
        """Append the rows of each commit at exactly its version.

        Args:
            found: version and rows by table, versions rising; a version without rows is left out.
        Raises:
            StoreError: the store has commits of its own, or the versions do not rise.
        """
        if current_version(self._catalog.read()):
            raise StoreError(f"{self._catalog.layout.root}: only an empty store can become the copy of another")
        rest = iter(found)
        here = next(rest, None)
        if here is not None:
            self._appender.append_all({}, inside=_ends_at(here[0] - 1))
        while here is not None:
            version, tables = here
            here = next(rest, None)
            if here is not None and here[0] <= version:
                raise StoreError(f"version {here[0]} comes after version {version}; commits must come in their order")
            inside = _ends_at(version if here is None else here[0] - 1)
            receipt = self._appender.append_all(tables, inside=inside)
            if receipt.version != version:  # somebody else writes into the store that is being filled
                raise StoreError(f"rows of version {version} came at version {receipt.version}; let nobody else write")

    def finish(self, state: Mapping[str, pa.Table], *, version: int, erased: Iterable[str]) -> None:
        """Put the bookkeeping back, end at `version`, and compare all of it with `state`.

        Args:
            erased: ids whose payload is gone: what their rows hashed to when they had it is kept.
        Raises:
            StoreError: statuses or anything else came out differently; names the first.
        """
        gone = set(erased)
        with self._catalog.transaction("put the bookkeeping back") as connection:
            for name in ("batch_state", "batch_history", "cursors"):
                names = STATE[name].names
                connection.executemany(
                    f"INSERT INTO {_SOURCES[name][0]} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",
                    _tuples(state[name]),
                )
            changed = ("uses", "reserved_by", "trained_step", "failed")
            rollouts = state["rollout_state"]
            connection.executemany(
                "UPDATE index_rollouts SET uses = ?, reserved_by = ?, trained_step = ?, failed = ? "
                "WHERE experience_id = ?",
                [
                    row for row in _tuples(rollouts.select([*changed, "experience_id"]))
                    if row[:4] != (0, None, None, 0)
                ],
            )  # fmt: skip
            connection.executemany(
                "UPDATE index_rollouts SET content = ? WHERE experience_id = ?",
                [row for row in _tuples(rollouts.select(["content", "experience_id"])) if row[1] in gone],
            )
            _ends_at(version)(connection)
        found = self.bookkeeping()
        for name, wanted in state.items():
            got = found[name]
            if name == "rollout_state":
                # a later package version may hash a row differently; what the row says was compared by its file
                got, wanted = (table.drop_columns(["content"]) for table in (got, wanted))
            if not got.equals(wanted):
                raise StoreError(f"{name} came out differently: {_difference(got, wanted)}")


def _ends_at(version: int) -> Callable[[Connection], None]:
    """A transaction after which the store is at `version`, whatever it counted itself."""

    def inside(connection: Connection) -> None:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'version'", (version,))

    return inside


def _tuples(table: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def _difference(found: pa.Table, wanted: pa.Table) -> str:
    if found.num_rows != wanted.num_rows:
        return f"{found.num_rows} rows, expected {wanted.num_rows}"
    pairs = zip(found.to_pylist(), wanted.to_pylist(), strict=True)
    return next(f"{one}, expected {other}" for one, other in pairs if one != other)
