"""Folding the write-ahead log into the catalog, on a thread of its own.

SQLite does it inside whichever commit makes the log long, which then takes several times as long as the others. A
passive checkpoint on another connection waits for nobody and makes nobody wait. It cannot shorten a log that is still
being written; a commit that finds the log `BACKSTOP_PAGES` long folds in the little that is left, and the log begins
anew.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable

from buffer_engine.store.connection import Connection

BACKSTOP_PAGES = 8192
"""Length of the log (32 MiB) at which a commit folds it in itself."""

_WORK = 4000
_COMMIT_WORK = 40
"""Rows changed, and what a commit counts besides, between two checkpoints: about a thousand pages of log."""


class Checkpointer:
    """Checkpoints of one process's commits; the thread begins with the first that is due."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._pid = os.getpid()
        self._due = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._changes = 0
        self._work = 0

    def committed(self, writer: sqlite3.Connection) -> None:
        """Take note of a commit of `writer`; the caller holds the catalog's lock."""
        self._work += writer.total_changes - self._changes + _COMMIT_WORK
        self._changes = writer.total_changes
        if self._work < _WORK:
            return
        self._work = 0
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(self._connect(),), name="store checkpoints", daemon=True
            )
            self._thread.start()
        self._due.set()

    def close(self) -> None:
        """End the thread; the catalog's connections may be closed afterwards."""
        self._stopping = True
        self._due.set()
        if self._thread is not None and os.getpid() == self._pid:
            self._thread.join()

    def _run(self, connection: Connection) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            if self._stopping:
                return
            try:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            except sqlite3.OperationalError:
                # Busy, or a full or failing disk. The log keeps every commit, and the next commit meets the same disk
                # and says so to whoever asked for it.
                continue
