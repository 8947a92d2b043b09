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

import pyarrow as pa
import pytest
from servers import SharedServers, missing, start_servers

from buffer_engine.store import LocalStore
from buffer_engine.store import open_store as open_plainly
from buffer_engine.store.layout import is_store
from buffer_engine.store.objects import ObjectFiles

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


def examples(many: int) -> int:
    """Examples of a property that are tried: fewer on servers, where each takes some ten times as long."""
    return many if _now == "local" else max(many // 8, 4)


def only_local(why: str) -> pytest.MarkDecorator:
    """Leaves a test out on shared servers, and says why."""
    return pytest.mark.only_local(why)


def rows_of(folder: Path, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
    """What a statement gives in the catalog of the store in a folder, whichever it is."""
    with open_plainly(folder, read_only=True) as store:
        return store._catalog.read().execute(sql, parameters).fetchall()


def frame_at(folder: Path, table: str, number: int) -> tuple[int, str, int]:
    """Id, file and offset of the `number`-th frame of a table."""
    return rows_of(
        folder,
        "SELECT f.frame_id, s.name, f.offset FROM frames f JOIN segments s USING (segment_id) WHERE f.tbl = ? "
        "ORDER BY f.frame_id",
        table,
    )[number]  # type: ignore[return-value]


def flip_bit(folder: Path, segment: str, at: int) -> None:
    """Flip one bit of a file, or of an object, of which no copy is left; a second call undoes it."""
    with open_plainly(folder, read_only=True) as store:
        files = store._files
        files.renew(segment)
        path = files.local(segment)
        handle = os.open(path, os.O_RDWR)
        (byte,) = os.pread(handle, 1, at)
        os.pwrite(handle, bytes([byte ^ 1]), at)
        os.close(handle)
        if isinstance(files, ObjectFiles):
            files._put(segment, pa.py_buffer(path.read_bytes()))
            path.unlink()
