"""DuckDB over the tables of a store, all at one version.

Arrow tables are registered, not copied: a query reads the columns and rows it needs out of the mapped files. Payload
tables go in as Arrow datasets, because DuckDB pushes filters only into those. Every table is also there unadorned in
schema `raw`; the views beside it add what has to be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from buffer_engine.inspect.library import named_queries, views
from buffer_engine.inspect.statements import QueryError, require_read
from buffer_engine.schema import BATCH_STATE, QUARANTINE, ROLLOUT_STATE, TABLES

if TYPE_CHECKING:
    from buffer_engine.store.base import ExperienceStore

VOCABULARY = pa.schema([pa.field("token_id", pa.int32(), nullable=False), pa.field("text", pa.string())])
"""Texts of token ids, for `tokens.token_text`."""

RELATIONS: dict[str, pa.Schema] = {
    **{name: spec.schema for name, spec in TABLES.items()},
    "rollout_state": ROLLOUT_STATE,
    "batch_state": BATCH_STATE,
    "quarantine": QUARANTINE,
    "vocabulary": VOCABULARY,
}
"""Every relation of schema `raw`."""

HEAVY = ("rollouts", "tasks")
ORDERED = ("scores", "decisions", "metrics", "events")
"""Tables that carry `row_order`, their order of commit, where views must know which of two rows came later."""

Parameters = Sequence[object] | Mapping[str, object]


class Inspection:
    """A read-only SQL connection. Not for use from several threads at once.

    Attributes:
        version: catalog version that every view shows; None when made from tables in memory.
    """

    def __init__(
        self,
        load: Callable[[], tuple[Mapping[str, pa.Table], int | None]],
        *,
        release: Callable[[], None] | None = None,
    ) -> None:
        """Make the views; use `connect` or `connect_store`.

        Args:
            load: gives the tables and the version they belong to; called again by `refresh`.
            release: called by `close`.
        """
        self._load = load
        self._release = release
        self._connection = duckdb.connect(":memory:", config={"python_enable_replacements": "false"})
        self._connection.execute("SET TimeZone = 'UTC'")
        self._connection.execute("SET enable_progress_bar = false")
        self.version: int | None = None
        self.refresh()
        self._define()
        for setting in (
            "enable_external_access = false",
            "autoinstall_known_extensions = false",
            "autoload_known_extensions = false",
            "lock_configuration = true",
        ):
            self._connection.execute(f"SET {setting}")

    def refresh(self) -> int | None:
        """Show the newest state; returns the version that is visible now."""
        tables, version = self._load()
        self._register(tables)
        self.version = version
        return version

    def query(self, sql: str, parameters: Parameters | None = None) -> pa.Table:
        """Run one reading statement and return all of its rows.

        Args:
            sql: SELECT, WITH, FROM, DESCRIBE, SHOW, SUMMARIZE, PIVOT or EXPLAIN; `$1` or `$name` stand for parameters.
        Raises:
            QueryError: the statement is no read, or DuckDB refuses it.
        """
        with self._reading(sql):
            relation = self._connection.sql(sql, params=parameters)
            return relation.to_arrow_table()

    @contextmanager
    def stream(self, sql: str, *, rows: int = 65_536) -> Generator[pa.RecordBatchReader]:
        """Run one reading statement and hand out its rows in batches of `rows`, for results larger than memory.

        No other query can run until the block is left.

        Raises:
            QueryError: the statement is no read, or DuckDB refuses it.
        """
        with self._reading(sql):
            reader = self._connection.sql(sql).to_arrow_reader(rows)
            try:
                yield reader
            finally:
                reader.close()

    def named(self, name: str) -> pa.Table:
        """Run a named query.

        Raises:
            QueryError: no query has this name.
        """
        return self.query(self.named_text(name))

    def named_text(self, name: str) -> str:
        """SQL of a named query, as `query` takes it.

        Raises:
            QueryError: no query has this name.
        """
        return query_text(name)

    def rows(self, sql: str, parameters: Parameters | None = None) -> list[dict[str, Any]]:
        """`query`, as one dict per row; maps are dicts too."""
        return self.query(sql, parameters).to_pylist(maps_as_pydicts="strict")

    def columns(self, view: str) -> list[tuple[str, str]]:
        """(name, DuckDB type) of a view's columns."""
        return [(row["column_name"], row["column_type"]) for row in self.rows(f'DESCRIBE "{view}"')]

    def close(self) -> None:
        """Let go of the connection and the mapped tables."""
        self._connection.close()
        if self._release is not None:
            self._release()

    def __enter__(self) -> Inspection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _register(self, tables: Mapping[str, pa.Table], *, prefix: str = "__") -> None:
        # All or nothing: a half-replaced set of relations would mix versions.
        for name, relation in {name: _relation(name, tables.get(name)) for name in RELATIONS}.items():
            self._connection.register(f"{prefix}{name}", relation)

    def _define(self, *, prefix: str = "__") -> None:
        """Make schema `raw` and the views of one store in the database that is in use."""
        self._connection.execute("CREATE SCHEMA raw")
        for name in RELATIONS:
            self._connection.execute(f'CREATE VIEW raw."{name}" AS SELECT * FROM temp.main."{prefix}{name}"')
        for view in views().values():
            self._connection.execute(f'CREATE VIEW main."{view.name}" AS {view.sql}')

    @contextmanager
    def _reading(self, sql: str) -> Generator[None]:
        names = list(views())
        require_read(self._connection, sql, names)
        # EXPLAIN ANALYZE runs what it explains; in a read-only transaction that cannot be a write either.
        self._connection.execute("BEGIN TRANSACTION READ ONLY")
        try:
            yield
        except duckdb.Error as error:
            raise QueryError.from_duckdb(error, names) from error
        finally:
            self._connection.execute("ROLLBACK")


def query_text(name: str) -> str:
    """SQL of a named query.

    Raises:
        QueryError: no query has this name.
    """
    known = named_queries()
    if name not in known:
        raise QueryError(f"no query is named {name!r}; known: {', '.join(known)}")
    return known[name].sql


def connect(tables: Mapping[str, pa.Table], *, vocabulary: pa.Table | None = None) -> Inspection:
    """Views over tables in memory.

    Args:
        tables: by the names of `schema.TABLES`, plus rollout_state and batch_state; a missing one is empty.
        vocabulary: columns token_id (int32) and text; None: `tokens.token_text` is null.
    """
    given = dict(tables) | ({} if vocabulary is None else {"vocabulary": vocabulary})
    unknown = sorted(set(given) - set(RELATIONS))
    if unknown:
        raise QueryError(f"unknown table {unknown[0]!r}; known: {', '.join(RELATIONS)}")
    return Inspection(lambda: (given, None))


def connect_store(
    store: ExperienceStore | Path | str, *, until: int | None = None, vocabulary: pa.Table | None = None
) -> Inspection:
    """Views over a store, which other processes may be writing meanwhile.

    Args:
        store: an open store, or its folder.
        until: show everything as of this version, status, uses and reservations too.
    Raises:
        StoreError: the folder holds no store, or `until` lies in the future.
    """
    from buffer_engine.inspect.snapshot import read_tables, resolve_store

    opened = resolve_store(store)
    extra = {} if vocabulary is None else {"vocabulary": vocabulary}

    def load() -> tuple[Mapping[str, pa.Table], int | None]:
        tables, version = read_tables(opened, until=until)
        return {**tables, **extra}, version

    # A store that was handed over stays open for whoever opened it.
    return Inspection(load, release=None if opened is store else opened.close)


def _relation(name: str, table: pa.Table | None) -> pa.Table | ds.Dataset:
    rows = RELATIONS[name].empty_table() if table is None else table
    if name in ORDERED:
        rows = rows.append_column("row_order", pa.array(np.arange(rows.num_rows, dtype=np.int64)))
    return ds.dataset(rows) if name in HEAVY else rows
