"""One source inside DuckDB: narrow columns as DuckDB's own tables, payload as Arrow that is only looked into.

Narrow rows are taken over when a query first asks for their table, and after that only the new ones: tables grow, they
do not change. DuckDB then knows their sizes and value ranges, and a store written in small pieces is read like one
written at once. Payload is registered, never copied; most queries need none, and those run against views in which it is
null (`light`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from buffer_engine.inspect.library import derived, views
from buffer_engine.inspect.relations import COUNTED, ORDERED, PAYLOAD, RELATIONS, STATES, narrow_columns
from buffer_engine.inspect.search import HITS, SearchIndex
from buffer_engine.inspect.source import Source

PIECE_ROWS = 262_144
"""Rows that are taken over at once: what is in memory twice for a moment."""

PACKED_FROM = 100_000
"""Rows that are worth packing when a connection is refreshed."""

LOOSE_AT_MOST = 6_000_000
"""Rows that are held unpacked, about 200 bytes each, however large the store."""


SEARCH = "SELECT * EXCLUDE (asked) FROM {hits} WHERE asked = words"
"""What `search('…')` stands for; the hits are there when the query runs."""


class LoadedSource:
    """A source in three databases of its own: narrow tables, views without payload, views with it."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, source: Source, *, number: int) -> None:
        """Make the databases with all views, empty.

        Args:
            connection: where payload is visible, so where queries that need it run.
            number: tells several sources apart.
        """
        self.source = source
        self.hot, self.light, self.full = f"hot_{number}", f"light_{number}", f"full_{number}"
        self._connection = connection
        self._prefix = f"__{number}_"
        self._until: dict[str, int | None] = {}
        self._order: dict[str, int] = {}
        self._payload: dict[str, tuple[int | None, tuple[Path, ...]]] = {}
        self._index: SearchIndex | None = None
        self._loose = 0
        self._searched: set[str] = set()
        self._searched_at: int | None = None
        connection.execute(f"ATTACH ':memory:' AS {self.hot} (COMPRESS)")
        for database in (self.light, self.full):
            connection.execute(f"ATTACH ':memory:' AS {database}")
        connection.execute(f"CREATE SCHEMA {self.hot}.derived")
        self._make_tables()
        for database in (self.light, self.full):
            self._make_views(database)
        self._maker = connection.cursor()
        self._maker.execute(f"USE {self.light}")

    def refresh(self) -> None:
        """Move to the newest version; rows are taken over when they are asked for."""
        if not self.source.refresh():
            self._forget()
        # Whoever refreshes asks again: packing takes a second per two million rows and pays from then on.
        if self._loose >= PACKED_FROM:
            self._pack()

    def take(self, names: Iterable[str]) -> None:
        """Have these relations, derived ones included, as of the source's version."""
        wanted = set(names)
        # The bookkeeping first: that of now is cheap, and each moment makes it likelier that it is of the past.
        if wanted & STATES.keys() and any(self._is_behind(name) for name in STATES):
            self._take_states()
        for name in sorted(wanted & RELATIONS.keys() - STATES.keys()):
            if self._is_behind(name):
                self._take_rows(name)
        for name, text in derived().items():
            if name in wanted and self._is_behind(name):
                self._maker.execute(f"CREATE OR REPLACE TABLE {self.hot}.derived.{name} AS {text.sql}")
                self._until[name] = self.source.version

    def take_payload(self, names: Iterable[str]) -> None:
        """Have the payload of these relations as of the source's version."""
        for name in sorted(set(names) & PAYLOAD.keys()):
            version, files = self._payload.get(name, (None, ()))
            # Files go some time after a compaction has merged them into others.
            there = name in self._payload and all(file.exists() for file in files)
            if not there or version != self.source.version:
                payload = self.source.payload(name)
                self._register_payload(name, payload.rest)
                if payload.files != files:
                    view = f'{self.full}.raw."{name}"'
                    self._connection.execute(f"CREATE OR REPLACE VIEW {view} AS {self._whole(name, payload.files)}")
                self._payload[name] = (self.source.version, payload.files)

    def _is_behind(self, name: str) -> bool:
        return name not in self._until or self._until[name] != self.source.version

    def _take_states(self) -> None:
        for name, rows in self.source.states().items():
            self._connection.register("__incoming", rows)
            self._connection.execute(f"DELETE FROM {self.hot}.main.{name}")
            self._connection.execute(f"INSERT INTO {self.hot}.main.{name} SELECT * FROM temp.main.__incoming")
            self._connection.unregister("__incoming")
            self._until[name] = self.source.version

    def _take_rows(self, name: str) -> None:
        columns = narrow_columns(name) + (["loss_mask", "token_ids"] if name == "rollouts" else [])
        after, order = self._until.pop(name, None) or 0, self._order.pop(name, 0)
        try:
            for piece in _pieces(self.source.rows(name, after=after, columns=columns)):
                incoming = _narrow(name, piece, first=order)
                self._connection.register("__incoming", incoming)
                self._connection.execute(f"INSERT INTO {self.hot}.main.{name} SELECT * FROM temp.main.__incoming")
                order += incoming.num_rows
                self._loose += incoming.num_rows
                if self._loose >= LOOSE_AT_MOST:
                    self._pack()
        except BaseException:
            # The next try begins anew: half a table must not be taken for a whole one.
            self._connection.execute(f"DELETE FROM {self.hot}.main.{name}")
            raise
        finally:
            self._connection.unregister("__incoming")
        self._order[name] = order
        self._until[name] = self.source.version

    def _pack(self) -> None:
        """Have DuckDB compress what was taken over: a tenth of the memory, and faster to read than before."""
        self._connection.execute(f"FORCE CHECKPOINT {self.hot}")
        self._loose = 0

    def _forget(self) -> None:
        """Drop everything that was read: rows may have gone."""
        for name in RELATIONS:
            self._connection.execute(f"DELETE FROM {self.hot}.main.{name}")
        self._until.clear()
        self._order.clear()
        self._payload.clear()
        self._searched.clear()
        self._connection.execute(f"DELETE FROM {self.hot}.main.search_hits")

    def _make_tables(self) -> None:
        for name, schema in RELATIONS.items():
            self._connection.register("__incoming", _narrow(name, schema.empty_table(), first=0))
            self._connection.execute(f"CREATE TABLE {self.hot}.main.{name} AS SELECT * FROM temp.main.__incoming")
            self._connection.unregister("__incoming")
        self._connection.register("__incoming", HITS.empty_table())
        self._connection.execute(f"CREATE TABLE {self.hot}.main.search_hits AS SELECT * FROM temp.main.__incoming")
        self._connection.unregister("__incoming")
        for name in PAYLOAD:
            # DuckDB may take an empty relation as known to be empty; one row of nulls says nothing about the others.
            schema = pa.schema([field.with_nullable(True) for field in RELATIONS[name]])
            self._register_payload(name, pa.table([pa.nulls(1, field.type) for field in schema], schema=schema))

    def _register_payload(self, name: str, rows: pa.Table) -> None:
        # As a dataset, because DuckDB pushes filters only into those.
        self._connection.register(f"{self._prefix}{name}", ds.dataset(rows))

    def _make_views(self, database: str) -> None:
        execute = self._connection.execute
        execute(f"USE {database}")
        execute("CREATE SCHEMA raw")
        execute("CREATE SCHEMA payload")
        execute("CREATE SCHEMA derived")
        for name in RELATIONS:
            execute(f'CREATE VIEW raw."{name}" AS {self._stored(name, whole=database == self.full)}')
        for name, columns in PAYLOAD.items():
            key = RELATIONS[name].names[0]
            picked = ", ".join([key, *columns])
            text = f"SELECT {picked} FROM raw.{name}"
            if database == self.light:
                # Grouped, so that DuckDB sees that joining it changes nothing, and leaves the join out.
                grouped = ", ".join(f"any_value({column}) AS {column}" for column in columns)
                text = f"SELECT {key}, {grouped} FROM raw.{name} WHERE false GROUP BY {key}"
            execute(f"CREATE VIEW payload.{name} AS {text}")
        execute(f"CREATE VIEW derived.rollouts AS SELECT * FROM {self.hot}.main.rollouts")
        for view in views().values():
            if view.name in derived():
                table = f"{self.hot}.derived.{view.name}"
                execute(f"CREATE OR REPLACE TABLE {table} AS {derived()[view.name].sql} LIMIT 0")
                execute(f"CREATE VIEW derived.{view.name} AS SELECT * FROM {table}")
            execute(f'CREATE VIEW main."{view.name}" AS {view.sql}')
        execute(f"CREATE MACRO main.search(words) AS TABLE {SEARCH.format(hits=f'{self.hot}.main.search_hits')}")
        execute("USE memory")

    def _stored(self, name: str, *, whole: bool) -> str:
        if name not in PAYLOAD:
            return f"SELECT * FROM {self.hot}.main.{name}"
        if whole:
            return self._whole(name, ())
        described = self._connection.execute(f"DESCRIBE {self._whole(name, ())}").fetchall()
        columns = [f"NULL::{kind} AS {column}" if column in PAYLOAD[name] else column for column, kind, *_ in described]
        return f"SELECT {', '.join(columns)} FROM {self.hot}.main.{name}"

    def take_hits(self, searches: Iterable[str]) -> None:
        """Have what these full-text searches find as of the source's version.

        Raises:
            QueryError: a search cannot be understood.
        """
        if self._searched_at != self.source.version:
            self._connection.execute(f"DELETE FROM {self.hot}.main.search_hits")
            self._searched.clear()
            self._searched_at = self.source.version
        for words in dict.fromkeys(searches):
            if words in self._searched:
                continue
            self.take(["rollouts"])
            if self._index is None:
                self._index = SearchIndex(self.source, self.source.folder)
            self._connection.register("__incoming", self._index.find(words, rows=self._order.get("rollouts", 0)))
            self._connection.execute(f"INSERT INTO {self.hot}.main.search_hits SELECT * FROM temp.main.__incoming")
            self._connection.unregister("__incoming")
            self._searched.add(words)

    def _whole(self, name: str, files: tuple[Path, ...]) -> str:
        """A table with its payload: what is registered, and Parquet files."""
        hot = f'SELECT * FROM temp.main."{self._prefix}{name}"'
        if not files:
            return hot
        # By name: a column that was added since a file was written is null in it.
        cold = f"SELECT * FROM read_parquet([{_placed(files)}], union_by_name = true, hive_partitioning = false)"
        return f"{hot} UNION ALL BY NAME {cold}"

    def close(self) -> None:
        """Let go of the source."""
        if self._index is not None:
            self._index.close()
        self._maker.close()
        self.source.close()


def _placed(files: Iterable[Path]) -> str:
    return ", ".join("'" + str(file).replace("'", "''") + "'" for file in files)


def _pieces(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The rows in tables of about `PIECE_ROWS`, however small the batches."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        if rows >= PIECE_ROWS:
            yield pa.Table.from_batches(held)
            held, rows = [], 0
    if held:
        yield pa.Table.from_batches(held)


def _narrow(name: str, rows: pa.Table, *, first: int) -> pa.Table:
    """The narrow columns in one chunk each, with what is counted beside them; `first`: rows that came before."""
    table = rows.select(narrow_columns(name)).combine_chunks()
    if name in ORDERED:
        order = np.arange(first, first + table.num_rows, dtype=np.int64)
        table = table.append_column("row_order", pa.array(order))
    if name == "rollouts":
        counts = (_sampled(rows.column("loss_mask")), pc.list_value_length(rows.column("token_ids")).cast(pa.int64()))
        for column, values in zip(COUNTED, counts, strict=True):
            table = table.append_column(column, values)
    return table


def _sampled(masks: pa.ChunkedArray) -> pa.Array:
    """How many elements of each list are true."""
    lengths = pc.list_value_length(masks).to_numpy()
    ends = np.cumsum(lengths, dtype=np.int64)
    flags: npt.NDArray[np.bool_] = pc.list_flatten(masks).to_numpy()
    running = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
    return pa.array(running[ends] - running[ends - lengths])
