"""What a program in the sandbox may use, and what is told about how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from buffer_engine.errors import OperatorError

Reason = Literal["ok", "error", "timeout", "memory", "output_limit", "killed", "refused"]

MEMORY_EXIT_CODE = 121
"""Exit code of a Python program that ended with an uncaught MemoryError."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds of one run; each is enforced, none is a hint.

    Attributes:
        seconds: wall time from the moment the program starts; then everything is killed.
        cpu_seconds: processor time of each process.
        memory_bytes: address space of each process, and resident memory of all of them together.
        processes: processes and threads at one time.
        open_files: open files of each process.
        file_bytes: size of one file.
        disk_bytes: size of the private file systems /tmp and /dev/shm, each.
        disk_files: files and folders in each of them.
        output_bytes: bytes on standard output and on standard error, each.
    """

    seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 512 << 20
    processes: int = 16
    open_files: int = 64
    file_bytes: int = 16 << 20
    disk_bytes: int = 32 << 20
    disk_files: int = 4096
    output_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise OperatorError(f"the sandbox limit {name} is {getattr(self, name)}: it must be more than 0")


@dataclass(frozen=True, slots=True)
class Run:
    """How a program ended.

    Attributes:
        reason: ok (exit code 0), error (another code or a signal), timeout (wall or processor time), memory,
            output_limit, killed (by another limit, or by SIGKILL), refused (nothing was run).
        exit_code: as a shell gives it, 128 + signal where a signal ended it; null where we killed it or nothing ran.
        stdout: what it wrote, as UTF-8 with bad bytes replaced; cut at `output_bytes`, with a last line that says so.
        stderr: the same for standard error.
        stdout_bytes: bytes that it wrote there until it ended, cut or not.
        stderr_bytes: the same for standard error.
        seconds: wall time from start to end; 0 where nothing ran.
        peak_memory_bytes: largest resident memory of all processes together in any sample (every 5 to 20 ms);
            null where the program ended before the first sample.
        detail: which limit ended it, or why nothing was run and what to do; else empty.
    """

    reason: Reason
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    seconds: float = 0.0
    peak_memory_bytes: int | None = None
    detail: str = ""
