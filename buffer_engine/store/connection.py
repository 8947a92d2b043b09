"""What the store asks of a connection to its catalog, so that one text of SQL serves every kind of catalog.

The store's modules write the subset of SQLite's SQL that `postgres_sql` can translate. `sqlite3.Connection` is such a
connection as it is.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

Parameters = Sequence[Any] | Mapping[str, Any]


class Cursor(Protocol):
    """Rows that a statement gives, as tuples."""

    @property
    def rowcount(self) -> int:
        """Rows that the statement changed."""
        ...

    def fetchone(self) -> Any:
        """The next row; None when there is none."""
        ...

    def fetchall(self) -> list[Any]:
        """All rows that are left."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """The rows one by one."""
        ...


class Connection(Protocol):
    """A connection to a catalog. Statements outside a transaction each see what was committed last."""

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        ...

    def execute(self, sql: str, parameters: Parameters = ..., /) -> Cursor:
        """Run one statement with `?` or `:name` in the place of values."""
        ...

    def executemany(self, sql: str, parameters: Iterable[Parameters], /) -> Cursor:
        """Run one statement that gives no rows, for each of the parameters."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


def stream(connection: Connection, sql: str, parameters: Parameters = ()) -> Iterator[Any]:
    """Rows of a statement of which the caller may want only the first; inside a transaction.

    SQLite makes rows as they are asked for. A server sends all at once unless it is told otherwise.
    """
    told = getattr(connection, "stream", None)
    return iter(connection.execute(sql, parameters)) if told is None else told(sql, parameters)


def is_unique_violation(error: BaseException) -> bool:
    """Whether a statement failed because a key is there already, whatever the catalog."""
    if isinstance(error, sqlite3.IntegrityError):
        return error.sqlite_errorname in ("SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY")
    return getattr(error, "sqlstate", None) == "23505"
