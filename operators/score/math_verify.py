"""math_verify: the answer compared with the gold answer as mathematics."""

from __future__ import annotations

import polars as pl
from pydantic import Field

from operators.base import Context, Contract, Operator, Result, RowError, ScoreOperatorConfig
from operators.expressions import Extraction, last_match
from operators.workers import Died, Reply, TimedOut, WorkerPool


class MathVerifyConfig(ScoreOperatorConfig):
    """Where the answer and the gold answer are, and how long one comparison may take."""

    column: str = Field("response", description="text column with the answer")
    gold: str = Field(description="column with the gold answer: LaTeX with or without $, or a plain expression")
    extract: Extraction | None = Field(
        None, description="regular expression with one group; the group of its last match is the answer"
    )
    timeout_seconds: float = Field(5.0, gt=0, description="longest time for one row; then its worker is ended")
    workers: int = Field(1, ge=1, description="processes that compare at the same time")


class MathVerify(Operator[MathVerifyConfig]):
    """Scores 1 where answer and gold are the same mathematical object (math-verify), else 0.

    A row without a gold answer cannot be scored (null); an answer in which no mathematics is found scores 0. A row that
    takes longer than `timeout_seconds`, ends its worker, or has a gold answer that cannot be read is an error of that
    row, handled by `on_error`. Comparisons run in processes of their own, because symbolic mathematics can hang.
    """

    Config = MathVerifyConfig
    requires = (("math_verify", "math"),)

    def __init__(self, config: MathVerifyConfig) -> None:
        super().__init__(config)
        self._pool: WorkerPool | None = None

    def contract(self) -> Contract:
        """Reads answer and gold; scores its own component."""
        reads = frozenset((self.config.column, self.config.gold))
        return Contract(reads=reads, scores=(self.config.name,), cost="python")

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Compare every row that has an answer and a gold answer."""
        pairs = frame.select(
            answer=last_match(pl.col(self.config.column), self.config.extract),
            gold=pl.col(self.config.gold).cast(pl.String),
        )
        values: list[float | None] = [None if gold is None else 0.0 for gold in pairs["gold"]]
        rows = (pairs["gold"].is_not_null() & pairs["answer"].is_not_null()).arg_true().to_list()
        errors: list[RowError] = []
        replies = self._workers().map([pairs.row(row, named=True) for row in rows]) if rows else []
        for row, reply in zip(rows, replies, strict=True):
            values[row], problem = self._outcome(reply)
            if problem:
                errors.append(RowError(row, problem))
        return Result(scores={self.config.name: pl.Series(self.config.name, values, pl.Float64)}, errors=errors)

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _workers(self) -> WorkerPool:
        if self._pool is None:
            self._pool = WorkerPool(
                "operators.score.math_worker",
                workers=self.config.workers,
                timeout_seconds=self.config.timeout_seconds,
            )
        return self._pool

    def _outcome(self, reply: Reply) -> tuple[float | None, str]:
        if isinstance(reply, TimedOut):
            return None, f"timeout: the comparison took longer than {self.config.timeout_seconds:g} s"
        if isinstance(reply, Died):
            return None, "the comparing process ended without an answer"
        return (None, str(reply["error"])) if "error" in reply else (float(reply["value"]), "")
