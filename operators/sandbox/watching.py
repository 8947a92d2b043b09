"""Looks at a running sandbox from outside: its processes, their memory, its private file systems."""

from __future__ import annotations

import os
from dataclasses import dataclass

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    """One sample.

    Attributes:
        memory_bytes: resident memory of all processes; shared pages count once for each.
        processes: how many there are.
    """

    memory_bytes: int
    processes: int


def usage(root: int) -> Usage:
    """Sum over the process `root` and all below it; processes that end meanwhile do not count."""
    memory = count = 0
    waiting = [root]
    while waiting:
        process = waiting.pop()
        try:
            with open(f"/proc/{process}/statm", "rb") as file:
                memory += int(file.read().split()[1]) * _PAGE
            count += 1
            for task in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{task}/children", "rb") as file:
                    waiting += [int(child) for child in file.read().split()]
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    return Usage(memory, count)


def files_in(root: int, folders: tuple[str, ...] = ("tmp", "dev/shm")) -> int:
    """Files and folders in the fullest private file system of the process `root`; 0 once it has ended."""
    most = 0
    for folder in folders:
        try:
            found = os.statvfs(f"/proc/{root}/root/{folder}")
        except OSError:  # ended, or not mounted yet
            continue
        most = max(most, found.f_files - found.f_ffree)
    return most
