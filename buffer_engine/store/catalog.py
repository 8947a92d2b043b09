"""The catalog: one SQLite database in WAL mode whose transactions are the store's commit point.

A row exists when a committed transaction says so, whatever bytes lie in the segments. The version counts those
transactions. SQLite's `application_id` marks the file as ours and `user_version` carries the schema version, so both
can be read before any table is.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Generator
from contextlib import contextmanager
from urllib.parse import quote

from buffer_engine.errors import StoreError, StoreVersionError
from buffer_engine.schema import SCHEMA_VERSION, TABLES, TableSpec
from buffer_engine.store.base import Durability
from buffer_engine.store.faults import explained
from buffer_engine.store.layout import StoreLayout

APPLICATION_ID = 0x42664531  # "BfE1"
BUSY_SECONDS = 60.0

_COMMON = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('version', 0);
CREATE TABLE segments (
    segment_id INTEGER PRIMARY KEY, tbl TEXT NOT NULL, name TEXT NOT NULL UNIQUE, writer TEXT NOT NULL,
    head INTEGER NOT NULL, head_xxh3 INTEGER NOT NULL
);
CREATE TABLE frames (
    frame_id INTEGER PRIMARY KEY, tbl TEXT NOT NULL, segment_id INTEGER NOT NULL REFERENCES segments,
    offset INTEGER NOT NULL, length INTEGER NOT NULL, rows INTEGER NOT NULL,
    version INTEGER NOT NULL, xxh3 INTEGER NOT NULL
);
CREATE INDEX frames_of_table ON frames (tbl, version, frame_id);
CREATE TABLE cursors (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE runs (run_id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE batches (
    batch_id TEXT PRIMARY KEY, run_id TEXT NOT NULL, status TEXT NOT NULL, step INTEGER, rows INTEGER NOT NULL,
    model_version INTEGER NOT NULL, reserved_at REAL NOT NULL, expires_at REAL NOT NULL, committed_at REAL
);
CREATE INDEX batches_of_run ON batches (run_id, step);
CREATE INDEX batches_reserved ON batches (expires_at) WHERE status = 'reserved';
CREATE TABLE batch_history (
    entry INTEGER PRIMARY KEY, version INTEGER NOT NULL, batch_id TEXT NOT NULL, run_id TEXT NOT NULL,
    status TEXT NOT NULL, step INTEGER, rows INTEGER NOT NULL, reserved_at REAL NOT NULL, committed_at REAL, held TEXT
);
CREATE TABLE index_rollouts (
    sequence INTEGER PRIMARY KEY, experience_id TEXT NOT NULL UNIQUE,
    frame_id INTEGER NOT NULL, row INTEGER NOT NULL, content BLOB NOT NULL,
    run_id TEXT NOT NULL, task_id TEXT NOT NULL, group_id TEXT NOT NULL, group_size INTEGER NOT NULL,
    attempt INTEGER NOT NULL, sample_index INTEGER NOT NULL, turn_index INTEGER NOT NULL,
    partition TEXT NOT NULL, model_version INTEGER, failed INTEGER NOT NULL, group_first INTEGER NOT NULL,
    status TEXT NOT NULL DEFAULT 'new', uses INTEGER NOT NULL DEFAULT 0, reserved_by TEXT, trained_step INTEGER
);
CREATE INDEX rollouts_of_group ON index_rollouts (run_id, group_id);
CREATE INDEX rollouts_kept ON index_rollouts (run_id, partition, uses, group_first, group_id) WHERE status = 'kept';
CREATE INDEX rollouts_reserved ON index_rollouts (reserved_by) WHERE reserved_by IS NOT NULL;
CREATE TABLE index_tasks (
    task_id TEXT PRIMARY KEY, frame_id INTEGER NOT NULL, row INTEGER NOT NULL, content BLOB NOT NULL,
    partition TEXT NOT NULL, prompt_hash TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX tasks_of_prompt ON index_tasks (prompt_hash, partition);
"""


def _index_ddl(spec: TableSpec) -> str:
    kinds = {"string": "TEXT", "int32": "INTEGER", "int64": "INTEGER"}
    columns = ", ".join(f"{name} {kinds[str(spec.schema.field(name).type)]} NOT NULL" for name in spec.key)
    return (
        f"CREATE TABLE index_{spec.name} ({columns}, frame_id INTEGER NOT NULL, row INTEGER NOT NULL, "
        f"content BLOB NOT NULL, PRIMARY KEY ({', '.join(spec.key)})) WITHOUT ROWID;"
    )


def catalog_ddl() -> str:
    """SQL that makes an empty catalog of the current schema version."""
    indexes = [_index_ddl(spec) for spec in TABLES.values() if spec.key and spec.name not in ("rollouts", "tasks")]
    return _COMMON + "\n".join(indexes)


class Catalog:
    """Connections to one catalog: one for writing behind a lock, one per thread for reading."""

    def __init__(self, layout: StoreLayout, *, durability: Durability, read_only: bool) -> None:
        """Open (and when writable and missing, create) the catalog.

        Raises:
            StoreVersionError: it was written by another schema version.
            StoreError: it is not a catalog, or cannot be opened.
        """
        self.layout = layout
        self.read_only = read_only
        self._durability = durability
        self._pid = os.getpid()
        self._closed = False
        self.lock = threading.RLock()
        self._threads = threading.local()
        self._connections: list[sqlite3.Connection] = []
        with explained(layout.root, "open the store"):
            self._writer: sqlite3.Connection | None = None
            try:
                if read_only:
                    self.check(self.read())
                else:
                    self._writer = self._connect()
                    self._create_if_missing(self._writer)
            except BaseException:
                self.close()
                raise

    def read(self) -> sqlite3.Connection:
        """This thread's connection for reading; every statement sees the newest committed version."""
        self._usable()
        connection: sqlite3.Connection | None = getattr(self._threads, "connection", None)
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
        connection.execute("BEGIN")
        try:
            yield current_version(connection)
        finally:
            connection.execute("COMMIT")

    @contextmanager
    def transaction(self, doing: str) -> Generator[sqlite3.Connection]:
        """One write transaction, committed when the block ends and rolled back when it raises.

        Raises:
            StoreError: the store is read-only or closed, the disk is full, another process held the catalog too long.
        """
        self._usable()
        if self._writer is None:
            raise StoreError(f"{self.layout.root}: could not {doing}: the store was opened with read_only=True")
        with self.lock, explained(self.layout.root, doing):
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                # a failed COMMIT (full disk) leaves the transaction open; some failures have rolled back already
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close every connection; the last process to do so folds the write-ahead log into the catalog."""
        with self.lock:
            self._closed = True
            for connection in self._connections:
                if os.getpid() == self._pid:
                    connection.close()
            self._connections.clear()

    def _usable(self) -> None:
        if self._closed:
            raise StoreError(f"{self.layout.root}: the store is closed; open it again")
        if os.getpid() != self._pid:
            raise StoreError(
                f"{self.layout.root}: this store was opened by process {self._pid} before a fork; "
                "open the store again in the child process"
            )

    def _connect(self) -> sqlite3.Connection:
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
        connection.execute(f"PRAGMA synchronous = {'FULL' if self._durability == 'power' else 'NORMAL'}")
        return connection

    def _in_use(self) -> bool:
        """Whether a write-ahead log with content, or a process that shares one, stands beside the catalog."""
        log, shared = (self.layout.catalog.with_name(self.layout.catalog.name + end) for end in ("-wal", "-shm"))
        return shared.exists() or (log.exists() and log.stat().st_size > 0)

    def _create_if_missing(self, connection: sqlite3.Connection) -> None:
        if not _is_empty(connection):
            self.check(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")
        try:
            if _is_empty(connection):  # another process may have created it while this one waited
                for statement in catalog_ddl().split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self.check(connection)

    def check(self, connection: sqlite3.Connection) -> None:
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
                f"{self.layout.root}: the store has schema version {found} and this package knows no migration from "
                f"it to {SCHEMA_VERSION}; export it with the version that wrote it"
            )


def _is_empty(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)


def current_version(connection: sqlite3.Connection) -> int:
    """The catalog version that `connection` sees."""
    (version,) = connection.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
    return int(version)


def next_version(connection: sqlite3.Connection) -> int:
    """Count the running transaction and return the version that its commit makes visible."""
    connection.execute("UPDATE meta SET value = value + 1 WHERE key = 'version'")
    return current_version(connection)
