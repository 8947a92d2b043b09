"""A connection to PostgreSQL that speaks the store's SQL: `connection.Connection` over psycopg.

Statements are translated once and prepared by the server when they recur. Whole numbers go as 8 bytes, so one statement
has one plan. What the server reports becomes a `PostgresError`, which says whether the connection is gone with it.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Iterator
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from buffer_engine.errors import StoreError
from buffer_engine.extras import require
from buffer_engine.store.addresses import CatalogAddress
from buffer_engine.store.connection import Parameters
from buffer_engine.store.postgres_sql import Statement, conflict_clause, translate

if TYPE_CHECKING:
    import psycopg

_STREAMED_ROWS = 256
CONNECT_SECONDS = 10


class PostgresError(StoreError):
    """A statement or a connection failed.

    Attributes:
        sqlstate: the server's code; empty when it said none.
        lost: whether the connection is gone, so that the server has rolled back what was not committed.
    """

    def __init__(self, message: str, *, sqlstate: str = "", lost: bool = False) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.lost = lost


class _Nothing:
    """The answer to a statement that is about SQLite alone."""

    rowcount = 0

    def fetchone(self) -> Any:
        return None

    def fetchall(self) -> list[Any]:
        return []

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class PostgresConnection:
    """One session. Statements outside a transaction are committed one by one."""

    def __init__(self, address: CatalogAddress, *, synchronous: bool = True) -> None:
        """Connect.

        Raises:
            MissingExtraError: psycopg is not installed.
            PostgresError: nobody answers, or the server refuses.
        """
        self._psycopg = driver()
        self._address = address
        self._keys: dict[str, str] = {}
        self._streams = 0
        try:
            self._raw: psycopg.Connection[Any] = self._psycopg.Connection.connect(
                address.conninfo(), autocommit=True, cursor_factory=self._psycopg.RawCursor,
                connect_timeout=CONNECT_SECONDS, application_name=f"buffer-engine {holder_name()}",
                options=f'-c search_path="{address.schema}" -c client_min_messages=warning '
                f"-c synchronous_commit={'on' if synchronous else 'off'} -c TimeZone=UTC",
                keepalives_idle=30, keepalives_interval=10, keepalives_count=3,
            )  # fmt: skip
        except self._psycopg.Error as error:
            raise PostgresError(
                f"{address}: cannot connect to PostgreSQL [{_said(error)}]; check that the server runs and that "
                "PGPASSWORD or PGPASSFILE has the password",
                sqlstate=error.sqlstate or "",
                lost=True,
            ) from error
        from psycopg.types.numeric import Int8Dumper

        self._raw.adapters.register_dumper(int, Int8Dumper)
        self._raw.adapters.register_loader("numeric", _number_loader())

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open (a failed one is until it is rolled back)."""
        status = self._psycopg.pq.TransactionStatus
        return self._raw.info.transaction_status in (status.INTRANS, status.INERROR)

    @property
    def idle(self) -> bool:
        """Whether the session waits for a statement outside of a transaction."""
        return self._raw.info.transaction_status == self._psycopg.pq.TransactionStatus.IDLE

    @property
    def failed(self) -> bool:
        """Whether the open transaction can only be rolled back: COMMIT would do that without an error."""
        return self._raw.info.transaction_status == self._psycopg.pq.TransactionStatus.INERROR

    @property
    def lost(self) -> bool:
        """Whether the session is over."""
        return bool(self._raw.closed or self._raw.broken)

    @property
    def raw(self) -> psycopg.Connection[Any]:
        """The driver's connection."""
        return self._raw

    def execute(self, sql: str, parameters: Parameters = (), /) -> psycopg.Cursor[Any] | _Nothing:
        """See `Connection.execute`.

        Raises:
            PostgresError: the statement fails or the connection is lost.
        """
        statement = translate(sql)
        if statement is None:
            return _Nothing()
        try:
            return self._raw.execute(self._text(statement).encode(), statement.arrange(parameters) or None)
        except self._psycopg.Error as error:
            raise self.explained(error) from error

    def executemany(self, sql: str, parameters: Iterable[Parameters], /) -> psycopg.Cursor[Any] | _Nothing:
        """See `Connection.executemany`.

        Raises:
            PostgresError: the statement fails or the connection is lost.
        """
        statement = translate(sql)
        rows = list(parameters)
        if statement is None or not rows:
            return _Nothing()
        if len(rows) == 1:
            return self.execute(sql, rows[0])
        cursor = self._raw.cursor()
        copy = _copy_text(sql)  # costs the server about a tenth of as many INSERTs
        try:
            if copy is None:
                cursor.executemany(self._text(statement).encode(), [statement.arrange(row) for row in rows])
                return cursor
            with cursor.copy(copy.encode()) as sink:
                for row in rows:
                    sink.write_row(statement.arrange(row))
            return cursor
        except self._psycopg.Error as error:
            raise self.explained(error) from error

    def script(self, statements: Iterable[str]) -> None:
        """Run statements without parameters in one trip to the server.

        Raises:
            PostgresError: one fails or the connection is lost.
        """
        texts = [one.sql for one in map(translate, statements) if one is not None]
        try:
            self._raw.execute("; ".join(texts).encode(), prepare=False)
        except self._psycopg.Error as error:
            raise self.explained(error) from error

    def stream(self, sql: str, parameters: Parameters = ()) -> Iterator[Any]:
        """See `connection.stream`.

        Raises:
            PostgresError: the statement fails or the connection is lost.
        """
        statement = translate(sql)
        assert statement is not None
        self._streams += 1
        name = f"rows_{self._streams}"  # never closed: it goes with the transaction, and rows may be left in it
        try:
            self._raw.execute(
                f"DECLARE {name} NO SCROLL CURSOR FOR {statement.sql}".encode(), statement.arrange(parameters) or None
            )
            while part := self._raw.execute(f"FETCH {_STREAMED_ROWS} FROM {name}".encode(), prepare=False).fetchall():
                yield from part
        except self._psycopg.Error as error:
            raise self.explained(error) from error

    def close(self) -> None:
        """End the session."""
        self._raw.close()

    def _text(self, statement: Statement) -> str:
        if statement.replaces is None:
            return statement.sql
        if statement.replaces not in self._keys:
            self._keys[statement.replaces] = conflict_clause(*self._columns_and_key(statement.replaces))
        return statement.sql + self._keys[statement.replaces]

    def _columns_and_key(self, table: str) -> tuple[list[str], list[str]]:
        found = self._raw.execute(
            "SELECT a.attname, coalesce(a.attnum = ANY (i.indkey), false) FROM pg_catalog.pg_attribute a "
            "LEFT JOIN pg_catalog.pg_index i ON i.indrelid = a.attrelid AND i.indisprimary "
            "WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum",
            (f'"{table}"',),
        ).fetchall()
        return [name for name, _ in found], [name for name, in_key in found if in_key]

    def explained(self, error: Exception) -> PostgresError:
        """The store's error for one of the driver."""
        code: str = getattr(error, "sqlstate", None) or ""
        if self.lost:
            return PostgresError(
                f"{self._address}: the connection to PostgreSQL was lost [{_said(error)}]; what was acknowledged "
                "before is safe, and what was not is not stored: repeat it",
                sqlstate=code,
                lost=True,
            )
        return PostgresError(f"{self._address}: {_hint(_said(error), code)}", sqlstate=code)


def driver() -> ModuleType:
    """The package psycopg.

    Raises:
        MissingExtraError: it is not installed.
    """
    return require("psycopg", "postgres")


def holder_name() -> str:
    """This process as others see it: pid and host, short enough for the server's list of sessions (63 bytes)."""
    return f"{os.getpid()} on {socket.gethostname()[:36]}"


def _hint(said: str, code: str) -> str:
    if code == "55P03":
        return f"another process held the catalog for too long [{said}]; repeat the write"
    if code.startswith("53"):
        return f"PostgreSQL is out of room [{said}]; everything acknowledged is safe: give it more, then repeat"
    if code in ("42501", "25006"):
        return f"this user may not do that in the store's schema [{said}]; grant it, or open with read_only=True"
    if "NUL (0x00)" in said or "\\u0000" in said:
        return f"PostgreSQL cannot hold a text with a NUL character [{said}]; remove it from the id"
    return f"PostgreSQL refused a statement [{said}]; nothing of this transaction is stored"


def _said(error: Exception) -> str:
    return " ".join(str(error).split())


@cache
def _copy_text(sql: str) -> str | None:
    """`COPY` for a plain INSERT of values; None for any other statement."""
    found = re.fullmatch(r"INSERT INTO (\w+)(?: \(([\w, ]+)\))? VALUES \(\?(?:, \?)*\)", sql.strip())
    if found is None:
        return None
    columns = "" if found[2] is None else "(" + ", ".join(f'"{name}"' for name in found[2].split(", ")) + ")"
    return f"COPY {found[1]} {columns} FROM STDIN"


@cache
def _number_loader() -> Any:
    """Sums of whole numbers, which the server gives as `numeric`, as int."""
    from psycopg.adapt import Loader

    class NumberLoader(Loader):
        def load(self, data: Any) -> int | float:
            text = bytes(data).decode()
            return float(text) if "." in text or "N" in text else int(text)

    return NumberLoader
