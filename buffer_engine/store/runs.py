"""The lock that keeps two processes from running one run.

An advisory lock of the operating system, so it falls with the process however it ends. Such a lock belongs to the
process, not to the file handle, so a second `open_run` inside one process is caught by a list of its own.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from buffer_engine.errors import StoreBusyError
from buffer_engine.store.faults import explained

_here: set[tuple[int, Path]] = set()
_here_lock = threading.Lock()


@contextmanager
def hold_run(path: Path, run_id: str) -> Generator[None]:
    """Hold the lock file at `path` while the block runs.

    Raises:
        StoreBusyError: a live process holds it; names its pid.
    """
    mine = (os.getpid(), path.absolute())
    with _here_lock:
        if mine in _here:
            raise busy(run_id, str(os.getpid()))
        _here.add(mine)
    try:
        with explained(path, f"lock run {run_id!r}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise busy(run_id, os.pread(handle, 32, 0).decode().strip() or "unknown") from error
            with explained(path, f"lock run {run_id!r}"):
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(handle)
    finally:
        with _here_lock:
            _here.discard(mine)


def busy(run_id: str, holder: str) -> StoreBusyError:
    """The error for a run that `holder` (a pid, with a host where several machines share the store) is running."""
    return StoreBusyError(
        f"run {run_id!r} is being run by process {holder}; wait for it, stop it, or start a run with another name"
    )
