"""The folder in which Parquet files are written before they are published, and the lock for doing so on one machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from buffer_engine.errors import StoreBusyError
from buffer_engine.store.faults import explained

MAKING = "making"
"""Name of the folder in the store."""
_LOCK = "compact.lock"


@contextmanager
def hold_making(root: Path) -> Generator[None]:
    """Be the only process that moves frames of the store below `root` while the block runs.

    An advisory lock of the operating system, so it falls with the process however it ends.

    Raises:
        StoreBusyError: another one does; names its pid.
    """
    path = root / MAKING / _LOCK
    with explained(path, "lock the store for compaction"):
        path.parent.mkdir(exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise busy(root, os.pread(handle, 32, 0).decode().strip() or "unknown") from error
        with explained(path, "lock the store for compaction"):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def clear_making(root: Path) -> None:
    """Remove what a killed process had begun to write; for whoever holds the lock."""
    folder = root / MAKING
    with explained(folder, "clear what a killed compaction left"):
        folder.mkdir(exist_ok=True)
        for half in folder.iterdir():
            if half.name != _LOCK:
                half.unlink()


def busy(root: Path, holder: str) -> StoreBusyError:
    """The error while `holder` (a pid, with a host where several machines share the store) moves frames."""
    return StoreBusyError(f"{root}: process {holder} compacts or erases in this store; wait for it, then repeat")
