"""The catalog: a database whose transactions are the store's commit point; here one SQLite file in WAL mode.

A row exists when a committed transaction says so, whatever bytes lie in the segments. The version counts those
transactions. SQLite's `application_id` marks the file as ours and `user_version` carries the schema version, so both
can be read before any table is. `PostgresCatalog` replaces what is SQLite's own.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from urllib.parse import quote

from buffer_engine.errors import StoreError, StoreVersionError
from buffer_engine.schema import SCHEMA_VERSION
from buffer_engine.store.base import Durability
from buffer_engine.store.checkpointing import BACKSTOP_PAGES, Checkpointer
from buffer_engine.store.connection import Connection
from buffer_engine.store.ddl import APPLICATION_ID, catalog_ddl, migrate
from buffer_engine.store.faults import explained
from buffer_engine.store.layout import CATALOG, StoreLayout
from buffer_engine.store.making import hold_making
from buffer_engine.store.runs import hold_run

BUSY_SECONDS = 60.0


class Catalog:
    """Connections to one catalog: one for writing behind a lock, one per thread for reading.

    Attributes:
        called: what findings and messages call it.
        shared: whether processes of other machines work with it too.
    """

    called = CATALOG
    shared = False

    begin_reading = "BEGIN"
    """Starts a transaction that sees one version throughout."""

    def __init__(self, layout: StoreLayout, *, durability: Durability, read_only: bool) -> None:
        """Open (and when writable and missing, create) the catalog.

        Raises:
            StoreVersionError: it was written by another schema version.
            StoreError: it is not a catalog, or cannot be opened.
        """
        self.layout = layout
        self.read_only = read_only
        self._durability: Durability = durability
        self._synchronous = "FULL" if durability == "power" else "NORMAL"
        self._pid = os.getpid()
        self._closed = False
        self.migrated_from: int | None = None
        self.lock = threading.RLock()
        self._threads = threading.local()
        self._connections: list[Connection] = []
        self._writer: Connection | None = None
        self._checkpoints = Checkpointer(self._connect)
        with explained(layout.root, "open the store"):
            try:
                if read_only:
                    self.check(self.read())
                else:
                    self._writer = self._connect()
                    self._create_if_missing(self._writer)
            except BaseException:
                self.close()
                raise

    def read(self) -> Connection:
        """This thread's connection for reading; every statement sees the newest committed version."""
        self.usable()
        connection: Connection | None = getattr(self._threads, "connection", None)
        if connection is None:
            connection = self._connect()
            self._threads.connection = connection
        return connection

    @contextmanager
    def snapshot(self) -> Generator[int]:
        """Hold still what this thread reads inside the block; yields the version that it sees."""
        connection = self.read()
        if connection.in_transaction:  # nested: the outer block ends it
            yield current_version(connection)
            return
        connection.execute(self.begin_reading)
        try:
            yield current_version(connection)
        finally:
            if connection.in_transaction:  # a lost connection has none
                connection.execute("COMMIT")

    @contextmanager
    def fresh(self) -> Generator[Connection]:
        """A connection that sees the newest committed version, inside a snapshot of this thread too."""
        connection = self.read()
        if not connection.in_transaction:
            yield connection
            return
        other = self._connect()
        try:
            yield other
        finally:
            with self.lock:
                if other in self._connections:
                    self._connections.remove(other)
            other.close()

    @contextmanager
    def transaction(self, doing: str, *, synced: bool = False) -> Generator[Connection]:
        """One write transaction, committed when the block ends and rolled back when it raises.

        Args:
            synced: the commit, and with it every earlier one, survives loss of power whatever the durability.

        Raises:
            StoreError: the store is read-only or closed, the disk is full, another process held the catalog too long.
        """
        self.usable(doing)
        assert isinstance(self._writer, sqlite3.Connection)
        with self.lock, explained(self.layout.root, doing):
            if synced:
                self._writer.execute("PRAGMA synchronous = FULL")
            try:
                self._take(self._writer)
                try:
                    yield self._writer
                    self._writer.execute("COMMIT")
                    self._checkpoints.committed(self._writer)
                except BaseException:
                    # a failed COMMIT (full disk) leaves the transaction open; some failures have rolled back already
                    if self._writer.in_transaction:
                        self._writer.execute("ROLLBACK")
                    raise
            finally:
                if synced:
                    self._writer.execute(f"PRAGMA synchronous = {self._synchronous}")

    def _take(self, writer: Connection) -> None:
        """Take the catalog, which another process may hold for a moment.

        SQLite's own waiting sleeps longer each time, up to 100 ms, so that of several processes the one that has
        waited longest looks least often. Here everyone looks each millisecond.
        """
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                writer.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorname != "SQLITE_BUSY" or time.monotonic() > deadline:
                    raise

    def hold_run(self, run_id: str) -> AbstractContextManager[None]:
        """Hold a run's name; the lock falls with the process.

        Raises:
            StoreBusyError: a live process holds it; names it.
        """
        return hold_run(self.layout.run_lock(run_id), run_id)

    def hold_compaction(self) -> AbstractContextManager[None]:
        """Be the only process that moves frames while the block runs; the lock falls with the process.

        Raises:
            StoreBusyError: another one does; names it.
        """
        return hold_making(self.layout.root)

    def problems(self) -> list[str]:
        """What the database finds wrong with itself."""
        found = self.read().execute("PRAGMA integrity_check(10)").fetchall()
        return [message for (message,) in found if message != "ok"]

    def close(self) -> None:
        """Close every connection; the last process to do so folds the write-ahead log into the catalog."""
        self._checkpoints.close()
        with self.lock:
            self._closed = True
            for connection in self._connections:
                if os.getpid() == self._pid:
                    connection.close()
            self._connections.clear()

    def usable(self, writing: str | None = None) -> None:
        """Refuse a closed catalog, one of another process and, with `writing`, one opened for reading.

        Raises:
            StoreError: says which.
        """
        if self._closed:
            raise StoreError(f"{self.layout.root}: the store is closed; open it again")
        if os.getpid() != self._pid:
            raise StoreError(
                f"{self.layout.root}: this store was opened by process {self._pid} before a fork; "
                "open the store again in the child process"
            )
        if writing is not None and self.read_only:
            raise StoreError(f"{self.layout.root}: could not {writing}: the store was opened with read_only=True")

    def _connect(self) -> Connection:
        uri = f"file:{quote(str(self.layout.catalog.absolute()))}"
        if self.read_only:
            uri += "?mode=ro"
            if not self.layout.writable() and not self._in_use():
                uri += "&immutable=1"  # WAL mode wants to make a -shm file, which a read-only folder cannot hold
        connection = sqlite3.connect(
            uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        with self.lock:
            self._connections.append(connection)
        connection.execute(f"PRAGMA wal_autocheckpoint = {BACKSTOP_PAGES}")
        connection.execute(f"PRAGMA synchronous = {self._synchronous}")
        return connection

    def _in_use(self) -> bool:
        """Whether a write-ahead log with content, or a process that shares one, stands beside the catalog."""
        log, shared = (self.layout.catalog.with_name(self.layout.catalog.name + end) for end in ("-wal", "-shm"))
        return shared.exists() or (log.exists() and log.stat().st_size > 0)

    def _create_if_missing(self, connection: Connection) -> None:
        if not _is_empty(connection):
            self.migrated_from = migrate(connection)
            self.check(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")
        try:
            if _is_empty(connection):  # another process may have created it while this one waited
                for statement in catalog_ddl():
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self.check(connection)
        connection.execute("PRAGMA busy_timeout = 1")  # see `_take`

    def check(self, connection: Connection) -> None:
        """Refuse a catalog that is not ours or of another schema version."""
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        if application == 0 and _is_empty(connection):
            raise StoreError(
                f"{self.layout.catalog}: the catalog is empty, so making the store was interrupted and holds nothing; "
                "start the run again, which makes it anew"
            )
        if application != APPLICATION_ID:
            raise StoreError(
                f"{self.layout.catalog}: this SQLite file is not a store's catalog (application id {application:#x}, "
                f"expected {APPLICATION_ID:#x}); name the folder of a store"
            )
        if found > SCHEMA_VERSION:
            raise StoreVersionError(
                f"{self.layout.root}: the store has schema version {found}, this package reads up to "
                f"{SCHEMA_VERSION}; install a newer buffer-engine (nothing was changed)"
            )
        if found < SCHEMA_VERSION:
            raise StoreVersionError(
                f"{self.layout.root}: the store has schema version {found}, this package reads {SCHEMA_VERSION}; "
                f"migrate it, which takes a moment and keeps every row: buffer-engine store migrate {self.layout.root}"
            )


def _is_empty(connection: Connection) -> bool:
    return connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)


def current_version(connection: Connection) -> int:
    """The catalog version that `connection` sees."""
    (version,) = connection.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
    return int(version)


def next_version(connection: Connection) -> int:
    """Count the running transaction and return the version that its commit makes visible."""
    connection.execute("UPDATE meta SET value = value + 1 WHERE key = 'version'")
    return current_version(connection)
