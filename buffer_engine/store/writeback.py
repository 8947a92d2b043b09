"""Asks the kernel to begin writing a file's bytes without waiting for them.

`fdatasync` then finds most of the work done. Python has no call for it, and only Linux has the system call; elsewhere
nothing happens and the sync does everything.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

_WRITE = 2  # SYNC_FILE_RANGE_WRITE: start writing dirty pages, wait for nothing


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Begin to write `length` bytes from `offset`; a hint, so that a refusal is no error (the sync will tell)."""
    call = _system_call()
    if call is not None and length > 0:
        call(descriptor, offset, length, _WRITE)


@cache
def _system_call() -> Callable[[int, int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
        call.restype = ctypes.c_int
    return call
