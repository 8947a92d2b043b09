"""python_batch: a function of many rows at a time."""

from __future__ import annotations

from typing import Any

import polars as pl
from pydantic import Field

from operators.base import Context, Result
from operators.python_calls import Failure, PythonCall, PythonCallConfig


class PythonBatchConfig(PythonCallConfig):
    """The function, its rows and its time."""

    batch_rows: int = Field(256, ge=1, description="most rows in one call")
    timeout_seconds: float = Field(30.0, gt=0, description="longest time for one call; then its process is ended")


class PythonBatch(PythonCall[PythonBatchConfig]):
    """Keeps, scores or derives with a Python function that gets a list of rows and gives a list of answers.

    Each row is a dictionary of the named columns, and the answers come in the order of the rows. It is for functions
    that are faster on many rows; the answer to a row must not depend on the others. A call that fails or takes too long
    is repeated row by row, so a bad row costs itself: it is an error of that row (`on_error`), as is an answer of
    another kind. The function is named and imported, never written in the specification, and runs in processes of its
    own. Its file counts in the operator's fingerprint; what it imports does not.
    """

    Config = PythonBatchConfig

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Call the function on every batch, and on single rows where that fails."""
        rows, size, seconds = self.rows(frame), self.config.batch_rows, self.config.timeout_seconds
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        answers: list[Any] = [answer for part in self.call(batches, batched=True, seconds=seconds) for answer in part]
        failed = [row for row, answer in enumerate(answers) if isinstance(answer, Failure)]
        again = self.call([[rows[row]] for row in failed], batched=True, seconds=seconds)
        for row, answer in zip(failed, again, strict=True):
            answers[row] = answer[0]
        return self.judged(frame, answers)
