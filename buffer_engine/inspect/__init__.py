"""Looking into a store with SQL: DuckDB views over its Arrow tables at one version, and named queries."""

from __future__ import annotations

from buffer_engine.inspect.connect import Inspection, connect, connect_store
from buffer_engine.inspect.library import SqlText, named_queries, views
from buffer_engine.inspect.several import StoreAt, connect_stores
from buffer_engine.inspect.statements import QueryError

__all__ = [
    "Inspection",
    "QueryError",
    "SqlText",
    "StoreAt",
    "connect",
    "connect_store",
    "connect_stores",
    "named_queries",
    "views",
]
