"""Runs one program in isolation and watches it until it ends or breaks a limit.

The order of things matters: bubblewrap makes the namespaces and tells the id of the first process in them, of which a
handle is kept; the launcher inside sets the limits and says that it starts, and from then on time counts. Whatever ends
the run, the first process is killed at the end, and with it the kernel kills every process of its namespace.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from buffer_engine.errors import OperatorError
from operators.sandbox.isolation import Isolation, find, inside_environment
from operators.sandbox.limits import MEMORY_EXIT_CODE, Limits, Reason, Run
from operators.sandbox.seccomp import denied_calls
from operators.sandbox.watching import files_in, usage

_LAUNCHER = Path(__file__).with_name("launcher.py").read_text(encoding="utf-8")
_START_SECONDS = 60.0
_FIRST_TICK, _LAST_TICK = 0.005, 0.02
_CHUNK = 65536
_UNPROTECTED = "; or, on Linux, `allow_unisolated: true` to run it unprotected"
_OWN_PROCESSES = 1
"""The first process of the namespace, which only waits for the others."""


class Sandbox:
    """Runs programs that may be hostile; may be used by several threads.

    Args:
        limits: what each run may use.
        python: interpreter for use inside; null: the one we run on if the sandbox can read it, else /usr/bin/python3.
        allow_unisolated: where isolation is not available on Linux, run all the same, with resource limits alone: such
            a program can read files, reach the network and outlive its run.
    """

    def __init__(
        self, limits: Limits | None = None, *, python: str | None = None, allow_unisolated: bool = False
    ) -> None:
        self.limits = limits or Limits()
        self._python = python
        self._allow_unisolated = allow_unisolated

    def missing(self) -> str:
        """Why programs cannot be isolated here and what to do about it; empty: they can."""
        found = self._isolation()
        return found if isinstance(found, str) else ""

    def run(self, command: Sequence[str], *, stdin: bytes = b"", files: Mapping[str, bytes] | None = None) -> Run:
        """Run a command in an empty folder.

        Args:
            command: program and arguments; the program is looked up in /usr/bin and /bin.
            stdin: what it can read on standard input.
            files: name (without folders) → content of files that lie in its folder.
        """
        return self._run(list(command), stdin, dict(files or {}), python=False)

    def run_python(
        self,
        source: str,
        *,
        arguments: Sequence[str] = (),
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
    ) -> Run:
        """Run a Python program as `main.py` in an empty folder, with the standard library alone."""
        given = {**(files or {}), "main.py": source.encode("utf-8", "surrogatepass")}
        return self._run(["main.py", *arguments], stdin, given, python=True)

    def _isolation(self) -> Isolation | str:
        return find(self._python)

    def _run(self, command: list[str], stdin: bytes, files: dict[str, bytes], *, python: bool) -> Run:
        for name in files:
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
                raise OperatorError(f"{name!r} cannot be a file of the sandbox: use letters, digits, dot, dash")
        isolation = self._isolation()
        if isinstance(isolation, str) and not (self._allow_unisolated and sys.platform == "linux"):
            return Run("refused", detail=f"the program was not run: {isolation}{_UNPROTECTED}")
        with ExitStack() as stack:
            running = _Started(self.limits, stack)
            if isinstance(isolation, str):
                running.unprotected(command, self._python or sys.executable, stdin, files, python=python)
            else:
                running.isolated(command, isolation, stdin, files, python=python)
            return running.watch()


@dataclass(slots=True)
class _Output:
    """One stream of the program, kept up to a limit."""

    limit: int
    kept: bytearray = field(default_factory=bytearray)
    count: int = 0

    def add(self, chunk: bytes) -> None:
        self.count += len(chunk)
        self.kept += chunk[: max(0, self.limit - len(self.kept))]

    @property
    def over(self) -> bool:
        return self.count > self.limit

    def text(self) -> str:
        said = self.kept.decode("utf-8", "replace")
        return f"{said}\n[output cut: {len(self.kept)} of {self.count} bytes are kept]\n" if self.over else said


class _Started:
    """One run: everything that must be closed is on the stack of the caller."""

    def __init__(self, limits: Limits, stack: ExitStack) -> None:
        self._limits = limits
        self._stack = stack
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._outputs = (_Output(limits.output_bytes), _Output(limits.output_bytes))
        self._process: subprocess.Popen[bytes] | None = None
        self._first = 0  # id of the first process of the sandbox, and a handle that cannot mean another process
        self._handle = -1
        self._private = False
        self._peak: int | None = None
        self._open: set[int] = set()
        self._dead = False

    def isolated(
        self, command: list[str], isolation: Isolation, stdin: bytes, files: dict[str, bytes], *, python: bool
    ) -> None:
        """Start under bubblewrap."""
        info_read, info_write = self._pipe(None)
        started_read, started_write = self._pipe(isolation.user)
        block_read, block_write = self._pipe(None)
        given = [(name, self._memory(name, content)) for name, content in files.items()]
        calls = denied_calls()
        filtered = None if calls is None else self._memory("seccomp", calls)
        line = isolation.arguments(info=info_write, seccomp=filtered, disk_bytes=self._limits.disk_bytes, files=given)
        line[1:1] = ["--block-fd", str(block_read)]
        line += [isolation.python, "-s", "-S", "-B", "-c", _LAUNCHER]
        line += self._order(started_write, command, python=python)
        passed = [info_write, started_write, block_read, *(number for _, number in given)]
        passed += [] if filtered is None else [filtered]
        self._start(line, stdin, passed, user=isolation.user, cwd="/", env={})
        self._close(info_write, started_write, block_read)
        told = self._read_all(info_read)
        if told:
            self._first = int(json.loads(told)["child-pid"])
            self._handle = os.pidfd_open(self._first)  # it waits for us, so the number is still its own
            self._stack.callback(os.close, self._handle)
            self._stack.callback(self.kill)  # before the handle is closed
            self._private = True
        self._close(block_write)
        self._await(started_read)

    def unprotected(
        self, command: list[str], interpreter: str, stdin: bytes, files: dict[str, bytes], *, python: bool
    ) -> None:
        """Start in a folder of its own with resource limits alone."""
        folder = Path(tempfile.mkdtemp(prefix="sandbox-"))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        started_read, started_write = self._pipe(None)
        line = [interpreter, "-s", "-S", "-B", "-c", _LAUNCHER]
        line += self._order(started_write, command, python=python)
        env = inside_environment() | {"HOME": str(folder), "TMPDIR": str(folder)}
        self._start(line, stdin, [started_write], user=None, cwd=str(folder), env=env)
        self._close(started_write)
        assert self._process is not None
        self._first = self._process.pid
        self._await(started_read)

    def watch(self) -> Run:
        """Wait for the end, or bring it about."""
        process = self._process
        assert process is not None
        begin = time.monotonic()
        ended = os.pidfd_open(process.pid)
        self._stack.callback(os.close, ended)
        self._selector.register(ended, selectors.EVENT_READ, None)
        broken: tuple[Reason, str] | None = None
        tick, seen = _FIRST_TICK, begin
        while broken is None and process.poll() is None:
            now = time.monotonic()
            if now - begin >= self._limits.seconds:
                broken = ("timeout", f"it ran longer than {self._limits.seconds:g} s")
            elif now - seen >= tick:
                broken, seen, tick = self._sample(), now, min(_LAST_TICK, tick * 2)
            else:
                self._receive(min(seen + tick, begin + self._limits.seconds) - now)
                broken = self._overflow()
        seconds = time.monotonic() - begin
        self._selector.unregister(ended)  # it stays readable, and waiting for the pipes would spin
        self.kill()
        self._drain()
        broken = broken or self._overflow()
        reason, code, detail = (broken[0], None, broken[1]) if broken else self._ending(process.returncode)
        out, err = self._outputs
        return Run(reason, code, out.text(), err.text(), out.count, err.count, seconds, self._peak, detail)

    def kill(self) -> None:
        """End the program and everything that it started."""
        process = self._process
        assert process is not None
        if self._dead:
            return
        self._dead = True
        if self._handle >= 0:
            try:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            except ProcessLookupError:
                self._handle = -1  # the namespace is gone already
        elif not self._private:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                process.wait()  # nobody is left in its group
        process.kill()
        process.wait()

    def _order(self, started: int, command: list[str], *, python: bool) -> list[str]:
        """Arguments of the launcher."""
        limits = self._limits
        bounds = {
            "RLIMIT_AS": limits.memory_bytes, "RLIMIT_NPROC": limits.processes + _OWN_PROCESSES,
            "RLIMIT_NOFILE": limits.open_files, "RLIMIT_FSIZE": limits.file_bytes, "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
        }  # fmt: skip
        lines = [f"{name}:{most}:{most}" for name, most in bounds.items()]
        # The soft limit gives a signal that tells it apart, the hard one ends a program that ignores the signal.
        lines.append(f"RLIMIT_CPU:{limits.cpu_seconds}:{limits.cpu_seconds + 1}")
        return [str(started), ",".join(lines), str(MEMORY_EXIT_CODE), "python" if python else "command", *command]

    def _start(
        self, line: list[str], stdin: bytes, passed: list[int], *, user: int | None, cwd: str, env: dict[str, str]
    ) -> None:
        pipes = [self._pipe(user) for _ in self._outputs]
        for (read, _), output in zip(pipes, self._outputs, strict=True):
            os.set_blocking(read, False)
            self._selector.register(read, selectors.EVENT_READ, output)
        self._process = subprocess.Popen(
            line, stdin=self._memory("stdin", stdin), stdout=pipes[0][1], stderr=pipes[1][1], pass_fds=passed,
            start_new_session=True, cwd=cwd, env=env, user=user, group=user,
            extra_groups=None if user is None else [],
        )  # fmt: skip
        self._stack.callback(self.kill)
        self._close(pipes[0][1], pipes[1][1])

    def _await(self, started: int) -> None:
        """Wait until the launcher has set the limits."""
        with selectors.DefaultSelector() as selector:
            selector.register(started, selectors.EVENT_READ)
            if not selector.select(_START_SECONDS):
                raise OperatorError(f"the sandbox did not start within {_START_SECONDS:.0f} s: the machine is too busy")
        if os.read(started, 1) != b"1":
            self.kill()
            self._drain()
            raise OperatorError(f"the sandbox did not start: {self._outputs[1].text().strip()}")

    def _sample(self) -> tuple[Reason, str] | None:
        found = usage(self._first)
        self._peak = max(self._peak or 0, found.memory_bytes) if found.processes else self._peak
        if found.memory_bytes > self._limits.memory_bytes:
            return "memory", f"its processes used more than {self._limits.memory_bytes} bytes together"
        if self._private and files_in(self._first) > self._limits.disk_files:
            return "killed", f"it made more than {self._limits.disk_files} files"
        return None

    def _overflow(self) -> tuple[Reason, str] | None:
        if any(output.over for output in self._outputs):
            return "output_limit", f"it wrote more than {self._limits.output_bytes} bytes"
        return None

    def _ending(self, code: int) -> tuple[Reason, int, str]:
        """Reason, exit code and detail of a program that ended by itself."""
        code = 128 - code if code < 0 else code
        if code == 0:
            return "ok", 0, ""
        if code == 128 + signal.SIGXCPU:
            return "timeout", code, f"it used more than {self._limits.cpu_seconds} s of processor time"
        if code == MEMORY_EXIT_CODE:
            return "memory", code, f"it asked for more than {self._limits.memory_bytes} bytes"
        if code == 128 + signal.SIGKILL:
            return (
                "killed",
                code,
                "SIGKILL ended it: a hard limit, a process of its own, or a want of memory",
            )
        return "error", code, ""

    def _receive(self, seconds: float) -> bool:
        """Read what there is; false once both streams are closed."""
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.data is None:
                continue
            chunk = os.read(key.fd, _CHUNK)
            if chunk:
                key.data.add(chunk)
            else:
                self._selector.unregister(key.fd)
        return any(key.data is not None for key in self._selector.get_map().values())

    def _drain(self) -> None:
        """Read what the dead have left in the pipes; what exceeds the limit by far stays unread."""
        if not self._private:  # something that left the process group may still hold the pipes
            self._receive(0.0)
            return
        end = time.monotonic() + _START_SECONDS
        while self._receive(0.05) and not self._overflow():
            if time.monotonic() > end:
                raise OperatorError("the output of a killed sandbox does not end: some process has survived")

    def _read_all(self, descriptor: int) -> bytes:
        chunks = b""
        while chunk := os.read(descriptor, 4096):
            chunks += chunk
        return chunks

    def _pipe(self, user: int | None) -> tuple[int, int]:
        ends = os.pipe()
        if user is not None:  # so that the program can open /dev/stdout
            os.fchown(ends[1], user, user)
        for end in ends:
            self._stack.callback(self._close, end)
        self._open |= set(ends)
        return ends

    def _memory(self, name: str, content: bytes) -> int:
        """A file in memory that nobody can change any more, to be read from its beginning."""
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._open.add(descriptor)
        self._stack.callback(self._close, descriptor)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        return descriptor

    def _close(self, *descriptors: int) -> None:
        for descriptor in descriptors:
            if descriptor in self._open:
                self._open.discard(descriptor)
                os.close(descriptor)
