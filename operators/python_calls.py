"""Functions of other people, called on rows in processes of their own.

What `python_row` and `python_batch` share: how a function is named, found and called, and what its answers mean.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import polars as pl
from pydantic import AfterValidator, Field, model_validator

from operators.base import Contract, Operator, Result, RowError, ScoreOperatorConfig
from operators.verdicts import verdicts_of
from operators.workers import Died, Reply, TimedOut, WorkerPool

_TYPES: dict[str, pl.DataType] = {
    "text": pl.String(), "number": pl.Float64(), "integer": pl.Int64(), "boolean": pl.Boolean(),
}  # fmt: skip
_PYTHON: dict[str, type | tuple[type, ...]] = {"text": str, "number": (int, float), "integer": int, "boolean": bool}


def _dotted(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", text):
        raise ValueError(f"{text!r} names no function: write package.module:function")
    return text


class PythonCallConfig(ScoreOperatorConfig):
    """The function, what it is given, and what becomes of its answer."""

    weight: float = Field(0.0, description="share of the score in the reward, with use: score")
    function: Annotated[str, AfterValidator(_dotted)] = Field(
        description="package.module:function; installed, or in a folder of PYTHONPATH"
    )
    columns: tuple[str, ...] = Field(min_length=1, description="columns that a row has as keys when it is given")
    use: Literal["keep", "score", "column"] = Field(
        "keep",
        description="keep: True keeps, False rejects with `reason`, a text rejects with that reason; score: a number, "
        "None where it cannot be scored; column: a value of `dtype`, or None",
    )
    into: str | None = Field(None, description="name of the new column, with use: column")
    dtype: Literal["text", "number", "integer", "boolean"] = Field("text", description="type of the new column")
    reason: str = Field("not_selected", min_length=1, description="reason of rows that are not kept")
    workers: int = Field(1, ge=1, description="processes that work at the same time")

    @model_validator(mode="after")
    def _fits_together(self) -> PythonCallConfig:
        if (self.use == "column") != (self.into is not None):
            raise ValueError("use: column needs `into`, and only use: column takes it")
        if self.weight and self.use != "score":
            raise ValueError(f"use: {self.use} gives no score that could have a weight")
        return self


CallConfigT = TypeVar("CallConfigT", bound=PythonCallConfig)


class PythonCall(Operator[CallConfigT]):
    """Base of operators that call a function; subclasses say how many rows at a time."""

    def __init__(self, config: CallConfigT) -> None:
        super().__init__(config)
        self._pool: WorkerPool | None = None

    def contract(self) -> Contract:
        """Reads the named columns; keeps, scores or writes."""
        return Contract(
            reads=frozenset(self.config.columns),
            writes={self.config.into: _TYPES[self.config.dtype]} if self.config.into is not None else {},
            scores=(self.config.name,) if self.config.use == "score" else (),
            drops=self.config.use == "keep",
            cost="python",
        )

    def files(self) -> tuple[Path, ...]:
        """The file of the function's module, so that another body is another fingerprint."""
        return (module_file(self.config.function.partition(":")[0]),)

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def judged(self, frame: pl.DataFrame, answers: Sequence[Any]) -> Result:
        """The result for one answer a row; an answer that is a `Failure` is an error of its row."""
        errors: list[RowError] = []
        values: list[Any] = []
        for row, answer in enumerate(answers):
            problem = answer.message if isinstance(answer, Failure) else self._misfit(answer)
            if problem:
                errors.append(RowError(row, problem))
            values.append(None if problem else answer)
        name, into = self.config.name, self.config.into
        if into is not None:
            return Result(columns={into: pl.Series(into, values, _TYPES[self.config.dtype])}, errors=errors)
        if self.config.use == "score":
            numbers = [None if value is None else float(value) for value in values]
            return Result(scores={name: pl.Series(name, numbers, pl.Float64)}, errors=errors)
        no = {False: self.config.reason, True: None, None: None}
        reasons = [value if isinstance(value, str) else no[value] for value in values]
        told = pl.DataFrame({"reason": pl.Series(reasons, dtype=pl.String)})
        return Result(
            verdicts=verdicts_of(told, "reject", pl.col("reason"), detail=pl.lit(self.config.function)), errors=errors
        )

    def call(self, requests: Sequence[list[dict[str, Any]]], *, batched: bool, seconds: float) -> list[list[Any]]:
        """The answers to lists of rows, one request a list with so many seconds; a `Failure` where there is none."""
        if self._pool is None:
            self._pool = WorkerPool("operators.python_worker", workers=self.config.workers, timeout_seconds=seconds)
        messages = [{"function": self.config.function, "rows": rows, "batched": batched} for rows in requests]
        replies = self._pool.map(messages) if messages else []
        return [self._answers(reply, len(rows), seconds) for reply, rows in zip(replies, requests, strict=True)]

    def rows(self, frame: pl.DataFrame) -> list[dict[str, Any]]:
        """The rows as the function gets them."""
        return frame.select(list(dict.fromkeys(self.config.columns))).to_dicts()

    def _answers(self, reply: Reply, count: int, seconds: float) -> list[Any]:
        if isinstance(reply, TimedOut):
            return [Failure(f"timeout: {self.config.function} took longer than {seconds:g} s")] * count
        if isinstance(reply, Died):
            return [Failure(f"the process of {self.config.function} ended without an answer")] * count
        if "error" in reply:
            return [Failure(str(reply["error"]))] * count
        return list(reply["values"])

    def _misfit(self, answer: Any) -> str:
        """What is wrong with an answer; empty: nothing."""
        use, said = self.config.use, f"{self.config.function} gave {answer!r:.80}"
        if use == "keep":
            fits = isinstance(answer, bool) or (isinstance(answer, str) and answer != "")
            return "" if fits else f"{said}, not true or false"
        if answer is None:
            return ""
        if use == "score":
            fits = isinstance(answer, int | float) and abs(answer) < float("inf")
            return "" if fits else f"{said}, not a number"
        kind = _PYTHON[self.config.dtype]
        fits = isinstance(answer, kind) and (self.config.dtype == "boolean" or not isinstance(answer, bool))
        return "" if fits else f"{said}, not {self.config.dtype}"


class Failure:
    """Stands for the answer to a row on which the function failed."""

    def __init__(self, message: str) -> None:
        self.message = message


def module_file(module: str) -> Path:
    """The file of a module, found without importing it or its packages; a file that is not there when there is none."""
    package, *rest = module.split(".")
    try:
        found = importlib.util.find_spec(package)
    except ValueError:  # the main module of the program has none
        found = None
    if found is None or found.origin is None:
        return Path(*module.split(".")).with_suffix(".py")
    if not rest:
        return Path(found.origin)
    base = Path(found.origin).parent.joinpath(*rest)
    return base / "__init__.py" if (base / "__init__.py").is_file() else base.with_suffix(".py")
