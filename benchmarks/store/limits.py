"""What the machine itself allows, measured beside the peers: copying memory, writing and syncing files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

MIB = 1 << 20


def memory_copy() -> float:
    """Bytes per second of one thread that copies 64 MiB."""
    source, target = np.ones(64 * MIB, dtype=np.uint8), np.zeros(64 * MIB, dtype=np.uint8)
    return 64 * MIB / min(_seconds(lambda: np.copyto(target, source)) for _ in range(5))


def sequential_write(folder: Path, total: int, each: int) -> float:
    """Bytes per second of a new file of `total` bytes, with an fdatasync after every `each` bytes."""
    block = os.urandom(each)
    path = folder / "sequential"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        os.posix_fallocate(handle, 0, total)

        def write() -> None:
            for at in range(0, total, each):
                os.pwrite(handle, block, at)
                os.fdatasync(handle)

        return total / _seconds(write)
    finally:
        os.close(handle)
        path.unlink()


@contextmanager
def synced_file(folder: Path, size: int, count: int) -> Generator[Callable[[], None]]:
    """A function that appends `size` bytes to a file with allocated space and syncs; call it at most `count` times."""
    block = os.urandom(size)
    path = folder / "appends"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    ends = iter(range(0, size * count, size))

    def write() -> None:
        os.pwrite(handle, block, next(ends))
        os.fdatasync(handle)

    try:
        os.posix_fallocate(handle, 0, size * count)
        yield write
    finally:
        os.close(handle)
        path.unlink()


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
