"""An agent from the side of the one that asks: starting it, asking it, what it holds in memory meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from benchmarks.store.clock import family_of, memory_of
from benchmarks.store.peers import PeerKind, Unsupported

ROOT = Path(__file__).resolve().parents[2]
_SAMPLED_EVERY = 0.02


class Process:
    """A peer opened in a process of its own; what it prints goes to a file beside its folder.

    Attributes:
        start_bytes: memory it held once the peer was open.
        peak_bytes: most memory it held while it worked, seen every 20 ms.
        open_seconds: what opening took, without imports.
    """

    def __init__(self, kind: PeerKind, folder: Path, *, patience: float = 300.0) -> None:
        python = kind.python()
        assert python is not None, "the caller looks whether it is installed"
        self.kind, self.folder = kind, folder
        self._patience = patience
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._log = folder.parent / f"{folder.name}-{time.monotonic_ns()}.log"
        with self._log.open("wb") as log:
            self._running = subprocess.Popen(
                [str(python), "-m", "benchmarks.store.agent", kind.name, str(folder)],
                cwd=ROOT, env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._running.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
        self._rest = b""
        self.peak_bytes = 0
        self.open_seconds = 0.0
        try:
            self.open_seconds = float(self.answer()["seconds"])
        except BaseException:
            self.kill()
            raise
        self.start_bytes = memory_of(family_of(self._running.pid))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, what: str, **request: object) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            Unsupported: the peer has no such operation.
            RuntimeError: it failed, ended, or took longer than the patience; says what.
        """
        self.send(what, **request)
        return self.answer()

    def send(self, what: str, **request: object) -> None:
        """Send a request without waiting."""
        assert self._running.stdin is not None
        self._running.stdin.write(json.dumps({"do": what, **request}).encode() + b"\n")
        self._running.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer; see `ask`."""
        deadline = time.monotonic() + self._patience
        while b"\n" not in self._rest:
            if self._selector.select(_SAMPLED_EVERY):
                got = os.read(self._running.stdout.fileno(), 1 << 20)  # type: ignore[union-attr]
                if not got:
                    raise RuntimeError(f"its process ended with {self._running.wait()}: {self._last_words()}")
                self._rest += got
            self.peak_bytes = max(self.peak_bytes, memory_of(family_of(self._running.pid)))
            if time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"given up after {self._patience:.0f} s")
        line, _, self._rest = self._rest.partition(b"\n")
        said: Mapping[str, Any] = json.loads(line)
        if "unsupported" in said:
            raise Unsupported(said["unsupported"])
        if "failed" in said:
            raise RuntimeError(str(said["failed"]))
        return dict(said)

    def close(self) -> None:
        """Close the peer and wait for the end of its process; killed when it takes longer than half a minute."""
        if self._running.poll() is None:
            try:
                self.ask("close")
                self._running.wait(30)
            except (RuntimeError, BrokenPipeError, subprocess.TimeoutExpired):
                self.kill()
        self._selector.close()
        for pipe in (self._running.stdin, self._running.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # a request that a dead process did not take
                pipe.close()

    def kill(self) -> None:
        """End the process and all that it started."""
        for pid in reversed(family_of(self._running.pid)):
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        self._running.wait()

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it printed nothing"


def _environment() -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{ROOT}:{path}" if path else str(ROOT)}
