"""A catalog in one schema of a PostgreSQL database, which several machines can share.

Writers take turns as they do with SQLite: each write transaction first locks the row of the version, so versions are
dense and in commit order, and what a transaction reads is what the last one left. A run's name is an advisory lock of
the writing session.

When the connection breaks during COMMIT nobody told us how it ended. Each transaction therefore counts itself in its
writer's own row, and the count is looked up over a new connection: it is never assumed.
"""

from __future__ import annotations

import os
import secrets
import select
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import xxhash

from buffer_engine.errors import StoreBusyError, StoreError, StoreVersionError
from buffer_engine.schema import SCHEMA_VERSION
from buffer_engine.store import making
from buffer_engine.store.addresses import CatalogAddress, SegmentsAddress
from buffer_engine.store.base import Durability
from buffer_engine.store.catalog import BUSY_SECONDS, Catalog
from buffer_engine.store.connection import Connection
from buffer_engine.store.ddl import catalog_ddl
from buffer_engine.store.faults import explained
from buffer_engine.store.layout import StoreLayout, new_writer_id
from buffer_engine.store.postgres import PostgresConnection, PostgresError, driver
from buffer_engine.store.postgres_locks import Busy, SessionLocks
from buffer_engine.store.runs import busy

_ABOUT = "buffer-engine store"
_OWN_DDL = (
    "CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE writers (writer TEXT PRIMARY KEY, turn INTEGER NOT NULL, seen_at REAL NOT NULL)",
)
_FORGET_WRITERS_SECONDS = 30 * 86400.0


class PostgresCatalog(Catalog):
    """See `Catalog`."""

    begin_reading = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
    called = "catalog"
    shared = True

    def __init__(
        self,
        layout: StoreLayout,
        address: CatalogAddress,
        *,
        durability: Durability,
        read_only: bool,
        create: bool = True,
        segments: SegmentsAddress | None = None,
    ) -> None:
        """Open (and with `create`, when missing, make) the catalog.

        Args:
            segments: where this process would look for segments, which must be where all others do.
        Raises:
            MissingExtraError: psycopg is not installed.
            StoreVersionError: it was made by another schema version.
            StoreError: it cannot be reached, is not there, or is not a catalog.
        """
        self._address = address
        self._create = create and not read_only
        self._segments = segments
        self._name = new_writer_id()
        self._turn = 0
        self._announced = False
        self._locks = SessionLocks(address.schema)
        self.store_id = ""
        super().__init__(layout, durability=durability, read_only=read_only)

    def read(self) -> PostgresConnection:
        """See `Catalog.read`; a session that the server has ended is replaced."""
        self.usable()
        connection: PostgresConnection | None = getattr(self._threads, "connection", None)
        if connection is None or (not connection.in_transaction and _ended(connection)):
            if connection is not None:
                self._drop(connection)
            connection = self._connect()
            self._threads.connection = connection
        return connection

    @contextmanager
    def transaction(self, doing: str, *, synced: bool = False) -> Generator[Connection]:
        """See `Catalog.transaction`; here every commit is `synced`.

        Raises:
            StoreError: the server is gone or refuses; says whether anything was stored.
        """
        self.usable(doing)
        with self.lock, explained(self.layout.root, doing):
            writer = self._ready()
            self._begin(writer, doing)
            try:
                yield writer
            except BaseException:
                self._roll_back(writer)
                raise
            self._commit(writer, doing)

    def hold_run(self, run_id: str) -> AbstractContextManager[None]:
        """See `Catalog.hold_run`; the name is free on all machines when the session of this process ends."""
        return self._holding(f"run {run_id}", f"hold run {run_id!r}", partial(busy, run_id))

    def hold_compaction(self) -> AbstractContextManager[None]:
        """See `Catalog.hold_compaction`; holds against all machines."""
        return self._holding("compaction", "lock the store for compaction", partial(making.busy, self.layout.root))

    @contextmanager
    def _holding(self, name: str, doing: str, taken: Busy) -> Generator[None]:
        self.usable(doing)
        with self.lock:
            self._locks.take(self._ready(), name, taken)
        try:
            yield
        finally:
            with self.lock:
                self._locks.leave(name)
                writer = self._writer
                if not self._closed and isinstance(writer, PostgresConnection) and not _ended(writer):
                    self._locks.unlock(writer, name)

    def problems(self) -> list[str]:
        """Indexes that the server knows to be incomplete; it checks its pages itself."""
        found = self.read().execute(
            "SELECT c.relname FROM pg_catalog.pg_index x JOIN pg_catalog.pg_class c ON c.oid = x.indexrelid "
            "WHERE c.relnamespace = to_regnamespace(?) AND NOT x.indisvalid ORDER BY 1",
            (f'"{self._address.schema}"',),
        )
        return [f"index {name} is incomplete; run REINDEX" for (name,) in found.fetchall()]

    def close(self) -> None:
        """End the sessions."""
        writer = self._writer
        mine = self._announced and os.getpid() == self._pid and not self._closed
        if mine and isinstance(writer, PostgresConnection) and writer.idle and not _ended(writer):
            try:
                writer.execute("DELETE FROM writers WHERE writer = ?", (self._name,))
            except PostgresError as error:
                if not error.lost:  # otherwise somebody forgets the row later
                    raise
        super().close()

    def check(self, connection: Connection) -> None:
        """Refuse a schema that is no catalog of ours, another version, or another place for segments."""
        if not _has_tables(connection):
            raise StoreError(f"{self._address}: there is no store in this schema; check the name, or let a run make it")
        if not _has(connection, "about"):
            raise StoreError(f"{self._address}: this schema holds something else; name one for the store alone")
        about: dict[str, str] = dict(connection.execute("SELECT key, value FROM about").fetchall())
        if about.get("application") != _ABOUT:
            raise StoreError(f"{self._address}: this schema holds something else; name one for the store alone")
        found = int(about["schema_version"])
        if found != SCHEMA_VERSION:
            newer = found > SCHEMA_VERSION
            raise StoreVersionError(
                f"{self._address}: the store has schema version {found}, this package reads "
                f"{'up to ' if newer else ''}{SCHEMA_VERSION}; "
                f"{'install a newer buffer-engine' if newer else 'no shared store of that version was ever released'} "
                "(nothing was changed)"
            )
        if about["segments"] != self._segments_place():
            raise StoreError(
                f"{self._address}: the segments of this store lie in {about['segments'] or 'the folder of the store'}, "
                f"not in {self._segments_place() or self.layout.segments}; open it with the same `segments`"
            )
        self.store_id = about["store"]
        if self._durability == "power":
            self._check_server(connection)

    def _check_server(self, connection: Connection) -> None:
        for name in ("fsync", "full_page_writes"):
            (value,) = connection.execute("SELECT current_setting(?)", (name,)).fetchone()
            if value != "on":
                raise StoreError(
                    f"{self._address}: durability `power` needs {name} = on, and the server has it {value}; "
                    "change the server, or open the store with durability `process`"
                )

    def _connect(self) -> PostgresConnection:
        connection = PostgresConnection(self._address)
        with self.lock:
            self._connections.append(connection)
        return connection

    def _drop(self, connection: Connection) -> None:
        with self.lock:
            if connection in self._connections:
                self._connections.remove(connection)
        connection.close()

    def _create_if_missing(self, connection: Connection) -> None:
        assert isinstance(connection, PostgresConnection)
        if self._create and not _has(connection, "about"):
            self._make(connection)
        self.check(connection)
        connection.execute("BEGIN")
        now = time.time()
        connection.execute("DELETE FROM writers WHERE seen_at < ?", (now - _FORGET_WRITERS_SECONDS,))
        connection.execute("INSERT INTO writers VALUES (?, 0, ?)", (self._name, now))
        connection.execute("COMMIT")
        self._announced = True
        self._for_writing(connection)

    def _make(self, connection: PostgresConnection) -> None:
        connection.execute("BEGIN")
        try:
            # two processes that make the store at the same time: the second finds it made
            key = xxhash.xxh3_64_intdigest(f"make {self._address.schema}".encode()) >> 1
            connection.execute("SELECT pg_advisory_xact_lock(?)", (key,))
            connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{self._address.schema}"')
            if not _has_tables(connection):
                connection.script([*_OWN_DDL, *catalog_ddl()])
                about = {
                    "application": _ABOUT, "schema_version": str(SCHEMA_VERSION), "store": secrets.token_hex(16),
                    "segments": self._segments_place(),
                }  # fmt: skip
                connection.executemany("INSERT INTO about VALUES (?, ?)", list(about.items()))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _segments_place(self) -> str:
        return "" if self._segments is None else self._segments.place

    def _for_writing(self, connection: Connection) -> None:
        milliseconds = int(BUSY_SECONDS * 1000)
        connection.execute(f"SET lock_timeout = {milliseconds}")
        # a machine that vanishes inside a transaction must not keep all others out for long
        connection.execute(f"SET idle_in_transaction_session_timeout = {2 * milliseconds}")
        for name, seconds in (("idle", 30), ("interval", 10), ("count", 3)):
            connection.execute(f"SET tcp_keepalives_{name} = {seconds}")

    def _ready(self) -> PostgresConnection:
        """The writing session, a new one when the server has ended it; held runs are locked again first.

        Raises:
            PostgresError: nobody answers.
            StoreBusyError: another process took a run that this one held.
        """
        assert isinstance(self._writer, PostgresConnection)
        if not self._writer.idle or _ended(self._writer):  # not idle: an interrupt left it in the middle of something
            self._replace_writer()
        return self._writer

    def _replace_writer(self) -> None:
        assert self._writer is not None
        self._drop(self._writer)
        # `_writer` stays the dropped one until its successor is complete, so that a failure here is tried again
        made = self._connect()
        try:
            self._locks.take_again(made)
            self._for_writing(made)
        except BaseException:
            self._drop(made)
            raise
        self._writer = made

    def _begin(self, writer: PostgresConnection, doing: str) -> None:
        self._turn += 1  # also of those that are rolled back: no two transactions have the same number
        try:
            writer.raw.execute(
                "BEGIN; SELECT value FROM meta WHERE key = 'version' FOR UPDATE; UPDATE writers SET turn = "
                f"{self._turn}, seen_at = {time.time()} WHERE writer = '{self._name}'".encode(),
                prepare=False,
            )
        except driver().Error as error:
            said = writer.explained(error)
            self._roll_back(writer)
            if said.sqlstate == "55P03":
                raise StoreBusyError(f"{self.layout.root}: could not {doing}: {said}") from error
            raise said from error

    def _roll_back(self, writer: PostgresConnection) -> None:
        if writer.lost or not writer.in_transaction:
            return
        try:
            writer.execute("ROLLBACK")
        except PostgresError as error:
            if not error.lost:  # a lost session has rolled back
                raise

    def _commit(self, writer: PostgresConnection, doing: str) -> None:
        if writer.failed:
            self._roll_back(writer)
            raise StoreError(f"{self.layout.root}: could not {doing}: a statement failed; nothing was stored")
        try:
            writer.execute("COMMIT")
        except PostgresError as error:
            if not error.lost:
                self._roll_back(writer)
                raise
            if not self._was_committed(error, doing):
                raise

    def _was_committed(self, lost: PostgresError, doing: str) -> bool:
        """Whether the transaction whose COMMIT was not answered is in the database.

        Raises:
            StoreError: the server does not come back in time to say.
        """
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                self._replace_writer()
                assert self._writer is not None
                # waits for a session that is still committing
                found = self._writer.execute(
                    "SELECT turn FROM writers WHERE writer = ? FOR UPDATE", (self._name,)
                ).fetchone()
            except PostgresError as error:
                if not error.lost or time.monotonic() > deadline:
                    raise StoreError(
                        f"{self.layout.root}: could not {doing}: the connection broke during the commit and the server "
                        f"did not answer again within {BUSY_SECONDS:.0f} s ({error}), so whether it is stored is not "
                        "known; repeat the same write when the server is back: a repeat is harmless"
                    ) from lost
                time.sleep(0.2)
            else:
                return found is not None and found[0] == self._turn


def _ended(connection: PostgresConnection) -> bool:
    """Whether an idle session is over. The server says so unasked, so a silent socket means that it is alive."""
    if connection.lost:
        return True
    if not select.select([connection.raw.fileno()], [], [], 0)[0]:
        return False
    try:
        connection.execute("SELECT 1")
    except PostgresError:
        return True
    return False


def _has(connection: Connection, table: str) -> bool:
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return connection.execute(query, (table,)).fetchone() is not None


def _has_tables(connection: Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None
