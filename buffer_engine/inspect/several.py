"""Several stores in one connection: every view and table of each, one under the other, with a column `store`.

Ids are deterministic in the run's name, so two stores may well hold the same ones. Each store's views are therefore
made in a database of its own, where nothing of another store can be joined in, and only their results are put together.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from buffer_engine.inspect.connect import RELATIONS, Inspection, query_text
from buffer_engine.inspect.library import named_queries, views
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
    return SeveralStores(stores, vocabulary=vocabulary)


class SeveralStores(Inspection):
    """A read-only SQL connection to several stores; each shows one version, they are not one moment.

    Attributes:
        versions: catalog version that each store shows.
    """

    def __init__(self, stores: Mapping[str, StoreAt], *, vocabulary: pa.Table | None = None) -> None:
        """Open the stores; use `connect_stores`."""
        from buffer_engine.inspect.snapshot import resolve_store

        self._until = {name: stored.until for name, stored in stores.items()}
        self._databases = {name: f"store_{number}" for number, name in enumerate(stores, start=1)}
        self._extra = {} if vocabulary is None else {"vocabulary": vocabulary}
        self.versions: dict[str, int] = {}
        with ExitStack() as opened:
            self._stores: dict[str, ExperienceStore] = {}
            for name, stored in stores.items():
                self._stores[name] = resolve_store(stored.store)
                if self._stores[name] is not stored.store:
                    opened.callback(self._stores[name].close)
            super().__init__(lambda: ({}, None))
            self._release = opened.pop_all().close

    def refresh(self) -> int | None:
        """Show the newest state of every store that is not shown as of a version; the versions are in `versions`."""
        from buffer_engine.inspect.snapshot import read_tables

        found = {name: read_tables(store, until=self._until[name]) for name, store in self._stores.items()}
        for name, (tables, version) in found.items():
            self._register({**tables, **self._extra}, prefix=f"__{self._databases[name]}_")
            self.versions[name] = version
        return None

    def named_text(self, name: str) -> str:
        """See `Inspection.named_text`; a named query is asked of each store by itself."""
        query_text(name)
        return self._union(f'main."query {name}"')

    def _define(self, *, prefix: str = "__") -> None:
        for database in self._databases.values():
            self._connection.execute(f"ATTACH ':memory:' AS {database}")
            self._connection.execute(f"USE {database}")
            super()._define(prefix=f"{prefix}{database}_")
            for query in named_queries().values():
                # Not the query's own name: some have that of a view, which they ask.
                self._connection.execute(f'CREATE VIEW main."query {query.name}" AS {query.sql}')
        self._connection.execute("USE memory")
        self._connection.execute("CREATE SCHEMA raw")
        for place, names in (("raw", RELATIONS), ("main", views())):
            for name in names:
                relation = f'{place}."{name}"'
                self._connection.execute(f"CREATE VIEW {relation} AS {self._union(relation)}")

    def _union(self, relation: str) -> str:
        quoted = {name: name.replace("'", "''") for name in self._databases}
        parts = [
            f"SELECT '{quoted[name]}' AS store, * FROM {database}.{relation}"
            for name, database in self._databases.items()
        ]
        return " UNION ALL BY NAME ".join(parts)
