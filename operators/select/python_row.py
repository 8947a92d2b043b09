"""python_row: a function of one row."""

from __future__ import annotations

import polars as pl
from pydantic import Field

from operators.base import Context, Result
from operators.python_calls import PythonCall, PythonCallConfig


class PythonRowConfig(PythonCallConfig):
    """The function and its time."""

    timeout_seconds: float = Field(5.0, gt=0, description="longest time for one row; then its process is ended")


class PythonRow(PythonCall[PythonRowConfig]):
    """Keeps, scores or derives with a Python function that gets one row as a dictionary of the named columns.

    The function is named and imported, never written in the specification, and runs in processes of its own: a row that
    takes too long, ends its process, raises, or is answered with something of another kind is an error of that row
    (`on_error`). A bool counts as a number for use: score. The file of the function counts in the operator's
    fingerprint; what it imports does not. The function must answer a row alike whenever and after whichever rows it
    comes.
    """

    Config = PythonRowConfig

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Call the function on every row."""
        answers = self.call([[row] for row in self.rows(frame)], batched=False, seconds=self.config.timeout_seconds)
        return self.judged(frame, [answer for part in answers for answer in part])
