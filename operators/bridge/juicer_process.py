"""Our side of the Data-Juicer process: start it, ask it within a time limit, and end it.

Everything that can go wrong with the process itself becomes a value (`TimedOut`, `Died`) or an error with the line to
type; nothing about operators and rows is known here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from buffer_engine.errors import MissingExtraError, OperatorError
from operators.workers import Died, TimedOut

_WORKER = Path(__file__).with_name("juicer_worker.py")
_START_SECONDS = 180.0
_OFFLINE = {
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PIP_NO_INDEX": "1",
    "UV_OFFLINE": "1",
}  # fmt: skip

Answer = tuple[Mapping[str, Any], pa.Table | None]


class JuicerProcess:
    """One process with Data-Juicer in it, in a working folder of its own that goes with it."""

    def __init__(self, python: str, *, network: bool) -> None:
        """Start it and wait until Data-Juicer is loaded.

        Args:
            python: the interpreter.
            network: leave the settings by which libraries stay offline as they are.
        Raises:
            MissingExtraError: Data-Juicer or something it imports is not installed there.
            OperatorError: the interpreter does not start, or ends at once.
        """
        self.python = python
        self._folder = Path(tempfile.mkdtemp(prefix="buffer-engine-juicer-"))
        self._errors = (self._folder / "stderr.txt").open("wb")
        own = Path(python) == Path(sys.executable)
        environment = {name: value for name, value in os.environ.items() if own or name != "PYTHONPATH"}
        environment |= {"HF_DATASETS_CACHE": str(self._folder / "datasets")} | ({} if network else _OFFLINE)
        try:
            self._process = subprocess.Popen(
                [python, str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd=self._folder,
                env=environment,
            )
        except OSError as error:
            self._errors.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise OperatorError(f"the interpreter {python!r} does not start: {error.strerror}") from error
        # Also when nobody closes it: the folder would outlive the program.
        self._end = weakref.finalize(self, _end, self._process, self._errors, self._folder, os.getpid())
        try:
            self.release = self._first()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(
        self, request: Mapping[str, Any], table: pa.Table | None = None, *, seconds: float
    ) -> Answer | TimedOut | Died:
        """The answer to one request. After `TimedOut` or `Died` the process is gone."""
        text, body = json.dumps({**request, "timeout": seconds}).encode(), b""
        if table is not None:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
            body = sink.getvalue().to_pybytes()
        deadline = time.monotonic() + seconds
        pipe = _pipe(self._process.stdin)
        try:
            pipe.write(struct.pack(">QQ", len(text), len(body)) + text + body)
            pipe.flush()
        except BrokenPipeError:
            self.close()
            return Died()
        answer = self._answer(deadline)
        if not isinstance(answer, tuple):
            self.close()
        return answer

    def close(self) -> None:
        """End it and remove its folder."""
        self._end()

    def _first(self) -> str:
        answer = self._answer(time.monotonic() + _START_SECONDS)
        if isinstance(answer, TimedOut):
            raise OperatorError(f"the Data-Juicer process of {self.python} did not start in {_START_SECONDS:.0f} s")
        if isinstance(answer, Died):
            lines = (self._folder / "stderr.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = lines[-1] if lines else "it said nothing"
            if last.startswith("ModuleNotFoundError"):  # pyarrow, which the process needs to say anything at all
                raise self._missing("pyarrow", last)
            raise OperatorError(
                f"the Data-Juicer process of {self.python} ended with code {self._process.wait()} at its start: {last}"
            )
        head = answer[0]
        if "missing" in head:
            raise self._missing(str(head["missing"]), str(head["message"]))
        return str(head["release"])

    def _missing(self, module: str, message: str) -> MissingExtraError:
        if Path(self.python) != Path(sys.executable):
            return MissingExtraError(
                f"Data-Juicer does not import in {self.python} ({message}): "
                f"{self.python} -m pip install 'py-data-juicer==1.6.1' aiohttp"
            )
        if importlib.util.find_spec("data_juicer") is None:
            return MissingExtraError.of("data_juicer", "juicer")
        return MissingExtraError(
            f"Data-Juicer is installed but does not import ({message}): pip install 'buffer-engine[juicer]' {module}"
        )

    def _answer(self, deadline: float) -> Answer | TimedOut | Died:
        lengths = self._bytes(16, deadline)
        if not isinstance(lengths, bytes):
            return lengths
        text, body = struct.unpack(">QQ", lengths)
        data = self._bytes(text + body, deadline)
        if not isinstance(data, bytes):
            return data
        return json.loads(data[:text]), pa.ipc.open_stream(data[text:]).read_all() if body else None

    def _bytes(self, count: int, deadline: float) -> bytes | TimedOut | Died:
        received = bytearray()
        pipe = _pipe(self._process.stdout)
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while len(received) < count:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return TimedOut()
                chunk = os.read(pipe.fileno(), min(count - len(received), 1 << 20))
                if not chunk:
                    return Died()
                received += chunk
        return bytes(received)


def _end(process: subprocess.Popen[bytes], errors: IO[bytes], folder: Path, owner: int) -> None:
    if os.getpid() != owner:  # a forked child that ends leaves its parent's process alone
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        try:
            _pipe(pipe).close()
        except BrokenPipeError:  # unsent bytes of a request that nobody will read
            continue
    errors.close()
    shutil.rmtree(folder, ignore_errors=True)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # both were asked for when the process was started
    return pipe
