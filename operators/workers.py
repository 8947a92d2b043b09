"""Worker processes that can be ended: a row that hangs costs its own time limit and one process, nothing else.

A worker is a Python module with a `main()` that prints `{"ready": true}` and then answers one line of JSON with one
line of JSON. Pipes and JSON rather than multiprocessing: nothing is pickled, and the caller's main module is not run
again.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from buffer_engine.errors import OperatorError

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import {module} as worker; worker.main()"
_START_SECONDS = 120.0


class TimedOut:
    """Stands for the reply of a request that took too long."""


class Died:
    """Stands for the reply of a request whose worker ended before answering."""


Reply = Mapping[str, Any] | TimedOut | Died


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    ready: bool = False
    request: int | None = None
    deadline: float = 0.0
    received: bytearray = field(default_factory=bytearray)


class WorkerPool:
    """Up to `workers` processes of one module, started when first needed and kept until `close`."""

    def __init__(self, module: str, *, workers: int, timeout_seconds: float) -> None:
        self._module = module
        self._size = workers
        self._timeout = timeout_seconds
        self._workers: list[_Worker] = []

    def map(self, requests: Sequence[Mapping[str, Any]]) -> list[Reply]:
        """One reply per request, in their order. Each request gets `timeout` in seconds added.

        Raises:
            OperatorError: a worker cannot start at all.
        """
        replies: dict[int, Reply] = {}
        waiting = deque(range(len(requests)))
        try:
            while len(replies) < len(requests):
                busy = sum(worker.request is not None for worker in self._workers)
                while len(self._workers) < min(self._size, busy + len(waiting)):
                    self._workers.append(self._start())
                for worker in self._workers:
                    if worker.ready and worker.request is None and waiting:
                        self._send(worker, waiting.popleft(), requests)
                self._receive(replies)
        except BaseException:
            self.close()  # a worker in the middle of a request would answer the next one with an old reply
            raise
        return [replies[index] for index in range(len(requests))]

    def close(self) -> None:
        """End every worker."""
        for worker in self._workers:
            _end(worker)
        self._workers.clear()

    def _start(self) -> _Worker:
        command = [sys.executable, "-c", _START.format(module=self._module), json.dumps(sys.path)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        return _Worker(process, deadline=time.monotonic() + _START_SECONDS)

    def _send(self, worker: _Worker, index: int, requests: Sequence[Mapping[str, Any]]) -> None:
        worker.request = index
        worker.deadline = time.monotonic() + self._timeout
        line = json.dumps({**requests[index], "timeout": self._timeout}).encode() + b"\n"
        pipe = _pipe(worker.process.stdin)
        try:
            pipe.write(line)
            pipe.flush()
        except BrokenPipeError:
            return  # the worker has ended; `_receive` sees its closed output and records it

    def _receive(self, replies: dict[int, Reply]) -> None:
        """Wait for the next reply, end of a worker or deadline."""
        active = [worker for worker in self._workers if worker.request is not None or not worker.ready]
        with selectors.DefaultSelector() as selector:
            for worker in active:
                selector.register(_pipe(worker.process.stdout), selectors.EVENT_READ, worker)
            patience = max(0.0, min(worker.deadline for worker in active) - time.monotonic())
            for key, _ in selector.select(patience):
                self._read(key.data, replies)
        for worker in [worker for worker in active if worker in self._workers and time.monotonic() >= worker.deadline]:
            if worker.request is not None:
                self._drop(worker, TimedOut(), replies)
            elif not worker.ready:
                raise OperatorError(f"a worker of {self._module} did not start within {_START_SECONDS:.0f} s")

    def _read(self, worker: _Worker, replies: dict[int, Reply]) -> None:
        chunk = _pipe(worker.process.stdout).read1(65536)
        if not chunk:
            if not worker.ready:
                raise OperatorError(f"a worker of {self._module} ended with code {worker.process.wait()} at its start")
            self._drop(worker, Died(), replies)
            return
        worker.received += chunk
        if not worker.received.endswith(b"\n"):
            return
        reply = json.loads(worker.received)
        worker.received.clear()
        if not worker.ready:
            worker.ready = True
        elif worker.request is not None:
            replies[worker.request] = reply
            worker.request = None

    def _drop(self, worker: _Worker, reply: Reply, replies: dict[int, Reply]) -> None:
        if worker.request is not None:
            replies[worker.request] = reply
        _end(worker)
        self._workers.remove(worker)


def _pipe(pipe: IO[bytes] | None) -> Any:
    assert pipe is not None  # both were asked for when the process was started
    return pipe


def _end(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.wait()
    for pipe in (worker.process.stdin, worker.process.stdout):
        try:
            _pipe(pipe).close()
        except BrokenPipeError:  # unsent bytes of a request that nobody will read
            continue
