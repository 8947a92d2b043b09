"""Several stores in one connection: every view and table of each, one under the other, with a column `store`.

Ids are deterministic in the run's name, so two stores may well hold the same ones. Each store's views are therefore
made in databases of its own, where nothing of another store can be joined in, and only their results are put together.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from buffer_engine.inspect.connect import Inspection, query_text
from buffer_engine.inspect.library import named_queries, views
from buffer_engine.inspect.loading import SEARCH
from buffer_engine.inspect.relations import RELATIONS, read_by
from buffer_engine.inspect.snapshot import resolve_store
from buffer_engine.inspect.source import StoreSource
from buffer_engine.inspect.statements import QueryError

if TYPE_CHECKING:
    from buffer_engine.store.base import ExperienceStore


@dataclass(frozen=True, slots=True)
class StoreAt:
    """A store as it was at a version (None: now); two of one store with different versions can be compared."""

    store: ExperienceStore | Path | str
    until: int | None = None


def connect_stores(stores: Mapping[str, StoreAt], *, vocabulary: pa.Table | None = None) -> SeveralStores:
    """Views over several stores, with a first column `store` that holds the names given here.

    Raises:
        QueryError: there is no store.
        StoreError: a folder holds no store, or a version lies in the future.
    """
    if not stores:
        raise QueryError("name at least one store")
    sources: dict[str, StoreSource] = {}
    with ExitStack() as opened:
        for name, at in stores.items():
            store = resolve_store(at.store)
            owned = store is not at.store
            if owned:
                opened.callback(store.close)
            sources[name] = StoreSource(store, until=at.until, vocabulary=vocabulary, owned=owned)
        inspection = SeveralStores(sources)
        opened.pop_all()
    return inspection


class SeveralStores(Inspection):
    """A read-only SQL connection to several stores; each shows one version, they are not one moment."""

    @property
    def versions(self) -> Mapping[str, int | None]:
        """Catalog version that each store shows."""
        return {name: loaded.source.version for name, loaded in self._loaded.items()}

    def named_text(self, name: str) -> str:
        """See `Inspection.named_text`; a named query is asked of each store by itself."""
        query_text(name)
        return f'SELECT * FROM "query {name}"'

    def _behind(self, sql: str) -> frozenset[str]:
        named = [query.sql for query in named_queries().values() if f'"query {query.name}"' in sql]
        return read_by(" ".join([sql, *named]))

    def _point(self) -> None:
        for connection, all_databases in (
            (self._light, {name: loaded.light for name, loaded in self._loaded.items()}),
            (self._connection, {name: loaded.full for name, loaded in self._loaded.items()}),
        ):
            for database in all_databases.values():
                connection.execute(f"USE {database}")
                for query in named_queries().values():
                    # Not the query's own name: some have that of a view, which they ask.
                    connection.execute(f'CREATE VIEW main."query {query.name}" AS {query.sql}')
            union = "all_light" if connection is self._light else "all_full"
            connection.execute(f"ATTACH ':memory:' AS {union}")
            connection.execute(f"USE {union}")
            connection.execute("CREATE SCHEMA raw")
            shown = [f'raw."{name}"' for name in RELATIONS] + [f'main."{name}"' for name in views()]
            shown += [f'main."query {name}"' for name in named_queries()]
            hits = [
                f"SELECT '{_quoted(name)}' AS store, * FROM {loaded.hot}.main.search_hits"
                for name, loaded in self._loaded.items()
            ]
            connection.execute(f"CREATE VIEW main.search_hits AS {' UNION ALL '.join(hits)}")
            connection.execute(f"CREATE MACRO main.search(words) AS TABLE {SEARCH.format(hits='main.search_hits')}")
            for relation in shown:
                connection.execute(f"CREATE VIEW {relation} AS {_union(relation, all_databases)}")


def _union(relation: str, databases: Mapping[str, str]) -> str:
    parts = [f"SELECT '{_quoted(name)}' AS store, * FROM {database}.{relation}" for name, database in databases.items()]
    return " UNION ALL BY NAME ".join(parts)


def _quoted(name: str) -> str:
    return name.replace("'", "''")
