"""code_tests: code in the answer, run with the task's tests in the sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from pydantic import Field, model_validator

from buffer_engine.errors import OperatorError
from operators.base import Context, Contract, Operator, Result, RowError, ScoreOperatorConfig
from operators.sandbox.limits import Limits, Run
from operators.sandbox.running import Sandbox

_HARNESS = Path(__file__).with_name("code_harness.py").read_text(encoding="utf-8")
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_LANGUAGES = ("python", "python3", "py")
_MOST = 400
_SPARE_SECONDS = 5.0


class CodeTestsConfig(ScoreOperatorConfig):
    """Where the code and its tests are, and what a run may use."""

    column: str = Field("response", description="text column with the reply")
    tests: str = Field(
        "tests",
        description="key of the task's info with the tests: a text of Python that asserts, a list of such texts, or a "
        "list of {input, output}: standard input and the standard output that is wanted",
    )
    stub: str | None = Field(
        None, description="key of the task's info with the head of the function, put before an answer that continues it"
    )
    entry_point: str | None = Field(
        None, description="key of the task's info with the function's name; the tests' check(…) is called with it"
    )
    all_or_nothing: bool = Field(False, description="1 when every test passes, else 0; default: the share that passes")
    timeout_seconds: float = Field(5.0, gt=0, description="longest wall time of one test")
    memory_mb: int = Field(512, ge=64, description="memory of one answer in MiB")
    sandboxes: int = Field(2, ge=1, le=256, description="answers that run at the same time")
    python: str | None = Field(
        None, description="interpreter inside; default: this program's if the sandbox can read it, or /usr/bin/python3"
    )
    allow_unisolated: bool = Field(
        False, description="where isolation is not available, run the code unprotected instead of refusing"
    )

    @model_validator(mode="after")
    def _stub_has_a_name(self) -> CodeTestsConfig:
        if self.stub is not None and self.entry_point is None:
            raise ValueError("stub needs entry_point: whether an answer is the whole function is seen by its name")
        return self


@dataclass(frozen=True, slots=True)
class _Job:
    """One answer to run: its program, and either tests to run with it or inputs with the outputs that are wanted."""

    row: int
    source: str
    asserts: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()


_Found = tuple[int, int, str]
"""Tests that passed, tests in all, what went wrong first."""


class CodeTests(Operator[CodeTestsConfig]):
    """Scores the share of the task's tests that the code in the reply passes; the first failure is the comment.

    The code is the last fenced block of Python (with `entry_point`, the last that defines it), else the last block
    without a language, else, without any block, the whole reply. Tests that assert run each in a fork of one sandboxed
    process, after the answer and in its namespace; {input, output} pairs each in a sandbox of their own, and are
    compared here, without regard to blanks at line ends. A reply without code scores 0; so does code that fails, hangs
    or breaks a limit. A row whose task has no tests cannot be scored (null). Tests that cannot be read, and a sandbox
    that does not start, are errors of the row.

    Raises OperatorError where isolation is not available, unless `allow_unisolated` is true.
    """

    Config = CodeTestsConfig

    def contract(self) -> Contract:
        """Reads the reply and the task; scores its own component."""
        reads = frozenset((self.config.column, "task_info"))
        return Contract(reads=reads, scores=(self.config.name,), cost="python")

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Run every answer that has tests."""
        values: list[float | None] = [None] * frame.height
        errors: list[RowError] = []
        comments: dict[int, str] = {}
        jobs: list[_Job] = []
        # A Python loop: every row becomes a program.
        for row, (text, info) in enumerate(frame.select(self.config.column, "task_info").rows()):
            try:
                job = self._job(row, text, json.loads(info or "{}"))
            except (ValueError, TypeError) as error:
                errors.append(RowError(row, f"the tests cannot be read: {error}"))
                continue
            if isinstance(job, _Job):
                jobs.append(job)
            elif job is not None:
                values[row], comments[row] = 0.0, job
        with ThreadPoolExecutor(max(1, min(self.config.sandboxes, len(jobs)))) as pool:
            for job, found in zip(jobs, pool.map(self._outcome, jobs), strict=True):
                if isinstance(found, RowError):
                    errors.append(found)
                    continue
                passed, total, problem = found
                values[job.row] = float(passed == total) if self.config.all_or_nothing else passed / total
                if problem:
                    comments[job.row] = _short(problem)
        scores = {self.config.name: pl.Series(self.config.name, values, pl.Float64)}
        return Result(scores=scores, errors=sorted(errors, key=lambda error: error.row), comments=comments)

    def _job(self, row: int, text: str | None, info: Any) -> _Job | str | None:
        """What to run; why there is nothing to run and the score is 0; null where there are no tests."""
        config = self.config
        if not isinstance(info, dict):
            raise ValueError("the task's info is not an object")
        tests = info.get(config.tests)
        if tests is None:
            return None
        name = None if config.entry_point is None else _text(info, config.entry_point)
        if name is not None and not name.isidentifier():
            raise ValueError(f"entry_point {name!r} is not a name")
        found: Any = [tests] if isinstance(tests, str) else tests
        if not isinstance(found, list) or not found:
            raise ValueError(f"{config.tests!r} must be a text or a list that is not empty")
        code = code_in(text or "", name)
        if not code.strip():
            return "there is no code in the reply"
        source = code if config.stub is None or name is None else _completed(_text(info, config.stub), code, name)
        if all(isinstance(test, str) for test in found):
            ending = "" if name is None else f"\ncheck({name})"
            return _Job(row, source, asserts=tuple(test + ending for test in found))
        pairs: list[Any] = found
        if all(isinstance(test, dict) and set(test) == {"input", "output"} for test in pairs):
            return _Job(row, source, pairs=tuple((_text(test, "input"), _text(test, "output")) for test in pairs))
        raise ValueError(f"{config.tests!r} must hold texts, or objects with exactly the keys input and output")

    def _outcome(self, job: _Job) -> _Found | RowError:
        try:
            return self._asserted(job) if job.asserts else self._compared(job)
        except _Refused:
            raise
        except OperatorError as error:
            return RowError(job.row, str(error))

    def _sandbox(self, seconds: float) -> Sandbox:
        memory = self.config.memory_mb << 20
        limits = Limits(seconds=seconds, cpu_seconds=int(self.config.timeout_seconds) + 1, memory_bytes=memory)
        return Sandbox(limits, python=self.config.python, allow_unisolated=self.config.allow_unisolated)

    def _asserted(self, job: _Job) -> _Found:
        seconds = self.config.timeout_seconds
        order = {"source": job.source, "tests": job.asserts, "seconds": seconds}
        sandbox = self._sandbox(seconds * len(job.asserts) + _SPARE_SECONDS)
        run = sandbox.run_python(_HARNESS, files={"order.json": json.dumps(order).encode()})
        _refuse(run)
        lines = [json.loads(line) for line in run.stdout.splitlines()[: len(job.asserts)] if line.startswith("[")]
        unsaid = f"{run.reason}: {run.detail or run.stderr.strip()[-_MOST:] or 'the answer ended its tests'}"
        said = [(bool(line[0]), str(line[1])) for line in lines]
        said += [(False, unsaid)] * (len(job.asserts) - len(said))
        return _counted(said)

    def _compared(self, job: _Job) -> _Found:
        sandbox = self._sandbox(self.config.timeout_seconds)
        said: list[tuple[bool, str]] = []
        for given, wanted in job.pairs:
            run = sandbox.run_python(job.source, stdin=given.encode("utf-8", "surrogatepass"))
            _refuse(run)
            if run.reason != "ok":
                last = run.stderr.strip().rsplit("\n", 1)[-1]
                said.append((False, f"{run.reason}: {run.detail or last or f'exit code {run.exit_code}'}"))
                continue
            same = _lines(run.stdout) == _lines(wanted)
            said.append((same, "" if same else f"expected {wanted[:80]!r}, got {run.stdout[:80]!r}"))
        return _counted(said)


class _Refused(OperatorError):
    """There is no isolation here."""


def _refuse(run: Run) -> None:
    if run.reason == "refused":
        raise _Refused(run.detail)


def code_in(text: str, name: str | None = None) -> str:
    """The code of a reply: see `CodeTests`.

    Args:
        name: function that the block must define, if any block does.
    """
    blocks = [(found[1].lower(), found[2]) for found in _FENCE.finditer(text)]
    if not blocks:
        return text
    python = [code for language, code in blocks if language in _LANGUAGES]
    candidates = python or [code for language, code in blocks if not language]
    defining = [code for code in candidates if name is not None and _definition(name).search(code)]
    chosen = defining or candidates
    return chosen[-1] if chosen else ""


def _definition(name: str) -> re.Pattern[str]:
    return re.compile(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b|^{re.escape(name)}[ \t]*=", re.MULTILINE)


def _completed(stub: str, code: str, name: str) -> str:
    """The program: what stands before the function in the stub and the whole function, or the stub and its rest."""
    if not _definition(name).search(code):
        return stub + code
    head = _definition(name).search(stub)
    return (stub[: head.start()] if head else stub) + "\n" + code


def _text(info: dict[str, Any], key: str) -> str:
    value = info.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is {value!r:.40}, not a text")
    return value


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _counted(said: Sequence[tuple[bool, str]]) -> _Found:
    first = next((place for place, (passed, _) in enumerate(said) if not passed), None)
    problem = "" if first is None else f"test {first + 1} of {len(said)}: {said[first][1]}"
    return sum(passed for passed, _ in said), len(said), problem


def _short(problem: str) -> str:
    """The same for the same failure: without addresses, and cut."""
    told = _ADDRESS.sub("0x…", problem)
    return told if len(told) <= _MOST else f"{told[:_MOST]}… ({len(told)} characters)"
