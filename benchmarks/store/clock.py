"""Wall and processor time of a piece of work, and what a family of processes has used and holds.

Linux only: processes that a peer starts (TransferQueue's Ray actors) are found in /proc.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Clock:
    """Seconds."""

    wall: float = 0.0
    cpu: float = 0.0


@contextmanager
def timed(*, family: bool = False) -> Generator[Clock]:
    """A clock that is read when the block ends; `family` adds the processes that this one started (to 10 ms)."""
    clock = Clock()
    others = _others() if family else 0.0
    begin, cpu = time.perf_counter(), time.process_time()
    yield clock
    clock.wall, clock.cpu = time.perf_counter() - begin, time.process_time() - cpu
    if family:
        clock.cpu += _others() - others


def family_of(pid: int) -> list[int]:
    """The process and all that descend from it."""
    found = [pid]
    for one in found:  # grows while it is walked
        try:
            for thread in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue
    return found


def memory_of(pids: list[int]) -> int:
    """Bytes of memory that these processes alone hold; pages of mapped files are the system's and do not count."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) * 1024
    return total


def _others() -> float:
    ticks = 0
    for pid in family_of(os.getpid())[1:]:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICK
