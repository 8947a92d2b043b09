"""DuckDB over the tables of a store, all at one version.

Every table is there unadorned in schema `raw`; the views beside it add what has to be computed. What a query does not
ask for is not read: see `loading`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from buffer_engine.inspect.library import named_queries, views
from buffer_engine.inspect.loading import LoadedSource
from buffer_engine.inspect.relations import PAYLOAD, RELATIONS, read_by
from buffer_engine.inspect.snapshot import resolve_store
from buffer_engine.inspect.source import Source, StoreSource, TablesSource
from buffer_engine.inspect.statements import QueryError, reads_payload, require_read, searches_in

if TYPE_CHECKING:
    from buffer_engine.store.base import ExperienceStore

Parameters = Sequence[object] | Mapping[str, object]


class Inspection:
    """A read-only SQL connection. Not for use from several threads at once."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        """Make the views; use `connect`, `connect_store` or `connect_stores`.

        Args:
            sources: what is shown, by the names that tell several apart; closed by `close`.
        """
        self._connection = duckdb.connect(":memory:", config={"python_enable_replacements": "false"})
        self._connection.execute("SET GLOBAL TimeZone = 'UTC'")  # of the connections that come after, too
        self._connection.execute("SET enable_progress_bar = false")
        self._loaded = {
            name: LoadedSource(self._connection, source, number=number)
            for number, (name, source) in enumerate(sources.items())
        }
        self._light = self._connection.cursor()
        self._point()
        for setting in (
            "enable_external_access = false",
            "autoinstall_known_extensions = false",
            "autoload_known_extensions = false",
            "lock_configuration = true",
        ):
            self._connection.execute(f"SET {setting}")

    @property
    def version(self) -> int | None:
        """Catalog version that every view shows; None: tables in memory, or several stores."""
        versions = [loaded.source.version for loaded in self._loaded.values()]
        return versions[0] if len(versions) == 1 else None

    def refresh(self) -> int | None:
        """Show the newest state; returns the version that is visible now."""
        for loaded in self._loaded.values():
            loaded.refresh()
        return self.version

    def query(self, sql: str, parameters: Parameters | None = None) -> pa.Table:
        """Run one reading statement and return all of its rows.

        Args:
            sql: SELECT, WITH, FROM, DESCRIBE, SHOW, SUMMARIZE, PIVOT or EXPLAIN; `$1` or `$name` stand for parameters.
        Raises:
            QueryError: the statement is no read, or DuckDB refuses it.
        """
        with self._reading(sql, parameters) as connection:
            return connection.sql(sql, params=parameters).to_arrow_table()

    @contextmanager
    def stream(self, sql: str, *, rows: int = 65_536) -> Generator[pa.RecordBatchReader]:
        """Run one reading statement and hand out its rows in batches of `rows`, for results larger than memory.

        No other query can run until the block is left.

        Raises:
            QueryError: the statement is no read, or DuckDB refuses it.
        """
        with self._reading(sql, None) as connection:
            reader = connection.sql(sql).to_arrow_reader(rows)
            try:
                yield reader
            finally:
                reader.close()

    def search(self, words: str) -> pa.Table:
        """Messages of rollouts that match, most relevant first, with the reward and fate of their rollout.

        Args:
            words: they must all occur; `"as written"`, OR, NOT, begin*.
        Raises:
            QueryError: the words cannot be understood.
        """
        return self.query(search_text(words))

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
        for loaded in self._loaded.values():
            loaded.close()
        self._light.close()
        self._connection.close()

    def __enter__(self) -> Inspection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _point(self) -> None:
        """Let the connections that queries run on see the views: `_light` without payload, `_connection` with it."""
        [loaded] = self._loaded.values()
        self._light.execute(f"USE {loaded.light}")
        self._connection.execute(f"USE {loaded.full}")

    @contextmanager
    def _reading(self, sql: str, parameters: Parameters | None) -> Generator[duckdb.DuckDBPyConnection]:
        """The connection to run a statement on, in a read-only transaction, with everything there that it reads."""
        names = list(views())
        require_read(self._connection, sql, names)
        connection = self._prepared(sql, parameters)
        # EXPLAIN ANALYZE runs what it explains; in a read-only transaction that cannot be a write either.
        connection.execute("BEGIN TRANSACTION READ ONLY")
        try:
            yield connection
        except duckdb.Error as error:
            raise QueryError.from_duckdb(error, names) from error
        finally:
            connection.execute("ROLLBACK")

    def _prepared(self, sql: str, parameters: Parameters | None) -> duckdb.DuckDBPyConnection:
        wanted, searches = self._behind(sql), searches_in(sql)
        for loaded in self._loaded.values():
            loaded.take(wanted)
            loaded.take_hits(searches)
        if not wanted & PAYLOAD.keys():
            return self._light
        if not reads_payload(self._connection, sql, parameters):
            return self._light
        for loaded in self._loaded.values():
            loaded.take_payload(wanted)
        return self._connection

    def _behind(self, sql: str) -> frozenset[str]:
        """Relations that the statement may read."""
        return read_by(sql)


def search_text(words: str) -> str:
    """The query that `Inspection.search` runs."""
    quoted = words.replace("'", "''")
    return (
        f"SELECT relevance, experience_id, position, role, snippet, reward, fate FROM search('{quoted}') "
        "JOIN experiences USING (experience_id) ORDER BY relevance DESC, sequence, position"
    )


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
    return Inspection({"": TablesSource(given)})


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
    opened = resolve_store(store)
    # A store that was handed over stays open for whoever opened it.
    owned = opened is not store
    try:
        return Inspection({"": StoreSource(opened, until=until, vocabulary=vocabulary, owned=owned)})
    except BaseException:
        if owned:
            opened.close()
        raise
