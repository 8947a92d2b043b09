"""Which of several alike rows stays: what every operator of this family is told."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from operators.base import OperatorConfig


class KeepingConfig(OperatorConfig):
    """Among which rows one stays, and which."""

    scope: tuple[str, ...] = Field((), description="columns within whose values rows are compared, e.g. [task_id]")
    keep: Literal["first", "best"] = Field(
        "first", description="first: lowest sample_index, then experience_id; best: highest `by`, then as first"
    )
    by: str | None = Field(None, description="numeric column for keep: best")
    history: bool = Field(True, description="compare with what earlier passes of the run kept, too; those always stay")

    @model_validator(mode="after")
    def _best_has_a_column(self) -> Self:
        if (self.keep == "best") != (self.by is not None):
            raise ValueError("keep: best needs `by`, and only keep: best takes it")
        return self
