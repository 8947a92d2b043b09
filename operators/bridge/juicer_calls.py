"""Rows through one operator of Data-Juicer: in batches, and one by one where a batch is lost.

What the process answers becomes an outcome for each row, or an error that stops the pass because no row is to blame.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from buffer_engine.errors import MissingExtraError, OperatorError, did_you_mean
from operators.bridge.juicer_process import Answer, JuicerProcess
from operators.bridge.juicer_shared import SharedProcess, borrow, give_back
from operators.bridge.juicer_table import Effect
from operators.workers import Died, TimedOut

_OPEN_SECONDS = 180.0
_KEYS = itertools.count()


@dataclass(frozen=True, slots=True)
class Failure:
    """Stands for the outcome of a row on which the operator failed."""

    message: str


Outcome = Mapping[str, Any] | Failure
"""Of a filter `keep` and `stat:NAME` (null: not a finite number), of a map `text`."""


class JuicerCalls:
    """One operator, its process, and how often it was lost."""

    def __init__(
        self,
        name: str,
        op: str,
        *,
        args: Mapping[str, Any],
        effect: Effect,
        stats: Sequence[str],
        python: str,
        release: str,
        network: bool,
        batch_rows: int,
        seconds: float,
        most_lost: int,
    ) -> None:
        self._name, self._op, self._args = name, op, dict(args)
        self._effect, self._stats = effect, list(stats)
        self._python, self._release, self._network = python, release, network
        self._batch_rows, self._seconds, self._most_lost = batch_rows, seconds, most_lost
        self._shared: SharedProcess | None = None
        self._made_in: JuicerProcess | None = None
        self._key = f"{name} {next(_KEYS)}"
        self._lost = 0

    def run(self, rows: pa.Table) -> list[Outcome]:
        """One outcome a row.

        Raises:
            MissingExtraError: Data-Juicer, or a package that this operator needs, is not installed.
            OperatorError: no such operator or argument, another effect or release than stated, something was to be
                fetched, or the process was lost too often.
        """
        self._lost = 0
        outcomes: list[Outcome] = []
        for start in range(0, rows.num_rows, self._batch_rows):
            outcomes += self._batch(rows.slice(start, self._batch_rows))
        return outcomes

    def close(self) -> None:
        """End the process, unless another operator uses it."""
        if self._shared is not None:
            give_back(self._shared)
            self._shared = self._made_in = None

    @property
    def _subject(self) -> str:
        return f"operator {self._name!r} ({self._op} of Data-Juicer)"

    def _batch(self, rows: pa.Table) -> list[Outcome]:
        answer = self._asked(rows)
        if isinstance(answer, tuple):
            head, table = answer
            self._check(head)
            assert table is not None  # what is not refused has results
            results: list[Outcome] = table.to_pylist()
            for row, text in head["errors"].items():
                results[int(row)] = Failure(text)
            return results
        self._count(answer)
        if rows.num_rows > 1:
            return [outcome for row in range(rows.num_rows) for outcome in self._batch(rows.slice(row, 1))]
        if isinstance(answer, TimedOut):
            return [Failure(f"timeout: {self._op} took longer than {self._seconds:g} s")]
        return [Failure(f"the process of {self._op} ended without an answer")]

    def _count(self, answer: TimedOut | Died) -> None:
        self._lost += 1
        if self._lost > self._most_lost:
            how = f"take longer than {self._seconds:g} s" if isinstance(answer, TimedOut) else "end their process"
            raise OperatorError(
                f"{self._subject}: {self._lost} calls of this pass were lost, the last ones {how}; "
                "raise timeout_seconds, lower batch_rows, or raise most_lost"
            )

    def _asked(self, rows: pa.Table) -> Answer | TimedOut | Died:
        if self._shared is None:
            self._shared = borrow(self._python, network=self._network)
        with self._shared.lock:
            try:
                process = self._shared.running()
                self._make(process)
                answer = process.ask({"do": "run", "key": self._key, "stats": self._stats}, rows, seconds=self._seconds)
            except BaseException:
                # Whatever happened in the middle of a request, the next one must not get its answer.
                self._stop(self._shared)
                raise
            if not isinstance(answer, tuple):
                self._stop(self._shared)
            return answer

    def _stop(self, shared: SharedProcess) -> None:
        if shared.process is not None:
            shared.process.close()
            shared.process = None

    def _make(self, process: JuicerProcess) -> None:
        """Have the operator made in this process, unless it is there."""
        if self._made_in is process:
            return
        if process.release != self._release:
            raise OperatorError(
                f"{self._subject} is for release {self._release}, {self._python} has {process.release}: "
                f"pip install 'py-data-juicer=={self._release}' there, or set release: {process.release}"
            )
        request = {"do": "open", "key": self._key, "op": self._op, "args": self._args, "network": self._network}
        answer = process.ask(request, seconds=_OPEN_SECONDS)
        if not isinstance(answer, tuple):
            raise OperatorError(f"{self._subject}: making it hangs or ends its process")
        self._check(answer[0])
        self._made_in = process

    def _check(self, head: Mapping[str, Any]) -> None:
        """Raise what the process says is in the way."""
        if head.get("refused") is not None:
            raise self._refusal(head["refused"])
        if "unknown" in head:
            raise OperatorError(
                f"{self._subject}: Data-Juicer {self._release} has no such operator; " + _hint(self._op, head["known"])
            )
        if "unsupported" in head:
            raise OperatorError(
                f"{self._subject} is a {head['unsupported']}, which needs the whole data set; "
                "filters and mappers can be used, and this package has deduplication and selection of its own"
            )
        if "strange" in head:
            hint = _hint(head["strange"], head["known"])
            raise OperatorError(f"{self._subject} has no argument {head['strange']!r}; {hint}")
        if "failed" in head:
            raise OperatorError(f"{self._subject} cannot be made with {self._args}: {head['failed']}")
        if head.get("effect", self._effect) != self._effect:
            raise OperatorError(f"{self._subject} is a {head['effect']}, not a {self._effect}: set effect accordingly")

    def _refusal(self, refused: Mapping[str, str]) -> OperatorError | MissingExtraError:
        what = refused["what"]
        if refused["kind"] == "package":
            return MissingExtraError(
                f"{self._subject} needs the package {what!r}, which is not installed, and nothing is installed by "
                f"itself: {self._python} -m pip install '{what}'"
            )
        if refused["kind"] == "command":
            return OperatorError(f"{self._subject} wanted to run {what!r}, which installs or fetches: do it beforehand")
        return OperatorError(
            f"{self._subject} wanted to fetch from {what}, and the network is off for it: put its files where "
            "Data-Juicer looks for them (DATA_JUICER_MODELS_CACHE), or set network: true"
        )


def _hint(name: str, known: Sequence[str]) -> str:
    """The nearest of many names; the whole list would be no help."""
    hint = did_you_mean(name, known)
    return hint if hint.startswith("did you mean") else f"none of its {len(known)} names is like that"
