"""Names that one process of all machines may hold: advisory locks of its writing session.

Such a lock falls with the session, so also when the process is killed. A session may take one twice, so a second holder
inside the process is caught by a list of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import xxhash

from buffer_engine.errors import StoreBusyError
from buffer_engine.store.connection import Connection
from buffer_engine.store.postgres import holder_name

_STALE_SECONDS = 2.0
"""How long a name may stay taken after its process was killed: the server notices a moment later."""

Busy = Callable[[str], StoreBusyError]
"""The error for a name that a process, which is told, holds."""


class SessionLocks:
    """What one process holds in one schema; the caller sees to it that only one thread at a time is in here."""

    def __init__(self, schema: str) -> None:
        self._schema = schema
        self._held: dict[str, Busy] = {}

    def take(self, connection: Connection, name: str, busy: Busy) -> None:
        """Take a name.

        Raises:
            StoreBusyError: a process holds it, perhaps this one.
        """
        if name in self._held:
            raise busy(holder_name())
        self._lock(connection, name, busy)
        self._held[name] = busy

    def take_again(self, connection: Connection) -> None:
        """Take what was held over another session, after that one was lost.

        Raises:
            StoreBusyError: another process was quicker.
        """
        for name in sorted(self._held):
            self._lock(connection, name, self._held[name])

    def leave(self, name: str) -> None:
        """Say that a name is no longer held; the session is another matter."""
        self._held.pop(name, None)

    def unlock(self, connection: Connection, name: str) -> None:
        """Free a name in the session that holds it."""
        connection.execute("SELECT pg_advisory_unlock(?)", (self._key(name),))

    def _lock(self, connection: Connection, name: str, busy: Busy) -> None:
        deadline = time.monotonic() + _STALE_SECONDS
        key = self._key(name)
        while connection.execute("SELECT pg_try_advisory_lock(?)", (key,)).fetchone() != (True,):
            if time.monotonic() > deadline:
                raise busy(_holder(connection, key))
            time.sleep(0.05)

    def _key(self, name: str) -> int:
        digest = xxhash.xxh3_64_intdigest(f"{self._schema} {name}".encode())
        return digest - (1 << 64) if digest >= 1 << 63 else digest


def _holder(connection: Connection, key: int) -> str:
    """The process whose session holds an advisory lock, by the name it gave itself."""
    found = connection.execute(
        "SELECT a.application_name FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid "
        "JOIN pg_catalog.pg_database d ON d.oid = l.database WHERE l.locktype = 'advisory' AND l.granted "
        "AND l.objsubid = 1 AND d.datname = current_database() AND (l.classid::bigint << 32) | l.objid::bigint = ?",
        (key,),
    ).fetchone()
    return "unknown" if found is None else str(found[0]).removeprefix("buffer-engine ")
