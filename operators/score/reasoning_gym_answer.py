"""reasoning_gym_answer: the answer scored by the task's own verifier in reasoning_gym."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import polars as pl
from pydantic import Field

from buffer_engine.extras import require
from operators.base import Context, Contract, Operator, Result, RowError, ScoreOperatorConfig
from operators.expressions import Extraction, last_match


class ReasoningGymAnswerConfig(ScoreOperatorConfig):
    """How the answer is found and whether part marks count."""

    column: str = Field("response", description="text column with the answer")
    extract: Extraction | None = Field(
        None, description="regular expression with one group; the group of its last match is the answer"
    )
    strip: bool = Field(True, description="ignore blanks around the answer")
    threshold: float | None = Field(
        1.0, ge=0, le=1, description="verifier scores from here on count as 1, all others as 0; null keeps part marks"
    )


class ReasoningGymAnswer(Operator[ReasoningGymAnswerConfig]):
    """Scores with the verifier of the task's reasoning_gym dataset.

    `task_info` must be a JSON object with the dataset's name at `dataset` and the keys of the entry beside it
    (question, answer, metadata). Where `extract` finds nothing there is no answer: 0. A task that is not of
    reasoning_gym, or a verifier that raises or gives no finite number, is an error of its row.
    """

    Config = ReasoningGymAnswerConfig
    requires = (("reasoning_gym", "demo"),)

    def contract(self) -> Contract:
        """Reads the answer and the task; scores its own component."""
        reads = frozenset((self.config.column, "task_info"))
        return Contract(reads=reads, scores=(self.config.name,), cost="python")

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Ask the verifier about every row."""
        answer = last_match(pl.col(self.config.column), self.config.extract)
        pairs = frame.select(answer.str.strip_chars() if self.config.strip else answer, pl.col("task_info"))
        verifiers = _Verifiers()
        values: list[float | None] = []
        errors: list[RowError] = []
        # A Python loop: the verifiers are Python functions of one entry.
        for row, (text, info) in enumerate(pairs.rows()):
            value: float | None = None
            try:
                value = 0.0 if text is None else self._marked(verifiers.score(text, info))
            except Exception as error:  # noqa: BLE001 - a failing verifier is an error of its row
                errors.append(RowError(row, f"{type(error).__name__}: {error}"))
            values.append(value)
        return Result(scores={self.config.name: pl.Series(self.config.name, values, pl.Float64)}, errors=errors)

    def _marked(self, score: float) -> float:
        return score if self.config.threshold is None else float(score >= self.config.threshold)


class _Verifiers:
    """Verifiers by dataset name, each built once."""

    def __init__(self) -> None:
        self._known: dict[str, Callable[[str, dict[str, Any]], float]] = {}

    def score(self, answer: str, task_info: str) -> float:
        entry: dict[str, Any] = json.loads(task_info)
        name = entry.get("dataset")
        if not isinstance(name, str):
            raise ValueError("the task's info has no key `dataset`: it is not a reasoning_gym task")
        if name not in self._known:
            self._known[name] = require("reasoning_gym", "demo").get_score_answer_fn(name)
        score = float(self._known[name](answer, entry))
        if not math.isfinite(score):
            raise ValueError(f"the verifier of {name!r} gave {score}")
        return score
