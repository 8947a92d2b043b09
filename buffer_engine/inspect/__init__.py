"""Looking into a store with SQL: DuckDB views over its Arrow tables at one version, and named queries."""

from __future__ import annotations

from buffer_engine.inspect.connect import Inspection, connect, connect_store
from buffer_engine.inspect.library import SqlText, named_queries, views
from buffer_engine.inspect.statements import QueryError

__all__ = ["Inspection", "QueryError", "SqlText", "connect", "connect_store", "named_queries", "views"]
