"""The store on one machine and on shared servers, for tests that hold for both.

A test module asks for the fixture `backend` and opens stores with `open_store` from here: under `shared` a store that
is not there yet gets a schema and a prefix of its own. Whoever opens the folder again finds them, other processes too.
"""

from __future__ import annotations

import atexit
import os
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
from servers import SharedServers, missing, start_servers

from buffer_engine.store import LocalStore
from buffer_engine.store import open_store as open_plainly
from buffer_engine.store.layout import is_store

Backend = Literal["local", "shared"]
_now: Backend = "local"


@cache
def shared_servers() -> SharedServers:
    """The servers of this test run, started by the first who asks and stopped when the tests end."""
    servers = start_servers()
    mine = os.getpid()
    atexit.register(lambda: servers.close() if os.getpid() == mine else None)
    return servers


def choose(backend: Backend) -> None:
    """Have `open_store` make stores of this kind; skips the test when the servers are not installed."""
    global _now
    if backend == "shared":
        why = missing()
        if why is not None:
            pytest.skip(f"shared back end: {why}")
        shared_servers()
    _now = backend


def open_store(path: str | os.PathLike[str], **options: Any) -> LocalStore:
    """`buffer_engine.store.open_store`, for the back end of the running test."""
    made_here = options.get("create", True) and not options.get("read_only", False)
    if _now == "shared" and made_here and not is_store(Path(path)):
        options |= shared_servers().new_store()
    return open_plainly(path, **options)
