"""The operator contract: what an operator reads and writes, and the doors by which rows leave it.

An operator is a pure function of a frame. It never touches the store: the runner turns its result into score rows,
decision rows and new rollouts, and checks that every row left through exactly one door.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import polars as pl
from pydantic import Field

from buffer_engine.config import ComponentConfig

Verdict = Literal["reject", "hold", "mask"]
Cost = Literal["expression", "python", "model"]
ErrorPolicy = Literal["raise", "reject", "hold"]


class OperatorConfig(ComponentConfig):
    """What every operator takes; each operator's own configuration extends it.

    `id` names the operator in decisions, reports and, for score operators, the reward component; default: the type.
    """

    type: str = Field(description="name of the operator in the registry")
    id: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="name in reports; default: the type")
    where: str | None = Field(None, description="SQL condition; rows that do not match pass through untouched")
    on_error: ErrorPolicy = Field(
        "reject", description="a row on which the operator fails: stop, reject it, or hold it"
    )

    @property
    def name(self) -> str:
        """The id in use."""
        return self.id or self.type.replace(".", "_")


class ScoreOperatorConfig(OperatorConfig):
    """A score operator writes the component named by its id; `weight` is its share in the reward."""

    weight: float = Field(1.0, description="share of the component in the reward; 0 makes it a metric only")


ConfigT = TypeVar("ConfigT", bound=OperatorConfig)


@dataclass(frozen=True, slots=True)
class Contract:
    """What an operator promises; checked before anything runs and on every result.

    Attributes:
        reads: columns it needs (see `operators.frame`; task info keys and earlier components are columns too).
        writes: columns it adds or replaces for later operators, with their type.
        scores: components it writes (each becomes a Float64 column for later operators): one with its id as name, which
            has the weight, and metrics without weight beside it whose names begin with the id and an underscore.
        scope: `row` (each row alone), `group` (needs whole groups) or `frame` (needs every row of the pass, as
            deduplication does).
        drops, holds, masks, adds: doors it may use besides keep.
        cost: how it runs: `expression` (vectorised Polars), `python` (rows in a process), `model` (calls a model).
        over: which rows it is shown: `survivors` of the operators before it, or `all` rows that passed the intake, with
            the column `alive` telling them apart; only living rows may be judged, scored or replaced.
        shapes: its components push the reward about (a length penalty) rather than measure the answer, so a group
            filter must not look at them.
    """

    reads: frozenset[str]
    writes: Mapping[str, pl.DataType] = field(default_factory=dict)
    scores: tuple[str, ...] = ()
    scope: Literal["row", "group", "frame"] = "row"
    drops: bool = False
    holds: bool = False
    masks: bool = False
    adds: bool = False
    cost: Cost = "expression"
    over: Literal["survivors", "all"] = "survivors"
    shapes: bool = False


@dataclass(frozen=True, slots=True)
class Context:
    """What an operator may know besides its frame.

    Attributes:
        seed: derived from the pipeline's seed and the operator's id; the only source of randomness.
        model_version: current weight version of the trainer.
        step: loop step.
        history: frame of the rows of this run that earlier passes kept, with the columns asked for (experience_id is
            always there); empty when there are none. For operators that compare with the past, such as deduplication.
    """

    seed: int
    model_version: int
    step: int
    history: Callable[[Sequence[str]], pl.DataFrame] = field(
        default=lambda columns: pl.DataFrame(schema=dict.fromkeys(("experience_id", *columns), pl.String))
    )


@dataclass(frozen=True, slots=True)
class RowError:
    """The operator failed on one row; the runner applies `on_error`."""

    row: int
    message: str


@dataclass(frozen=True, slots=True)
class Result:
    """What an operator found. Rows not named in `verdicts` or `errors` are kept.

    Attributes:
        columns: derived or replaced columns, each of the frame's height, for later operators of the same pass only.
        scores: component name → Float64 series of the frame's height; null = looked at, could not be scored.
        scored: rows to which `scores` apply (bool of the frame's height); None: all of them.
        verdicts: columns row (UInt32 index into the frame), verdict, reason, detail (null), ref_id (null); a row has
            one line at most.
        added: new rows: columns parent (UInt32 index) and messages (list of struct with at least role and content), and
            those of `ADDED_SCHEMA` that are needed; None: none.
        errors: rows on which the operator failed.
        comments: experience row → text kept with its score.
    """

    columns: Mapping[str, pl.Series] = field(default_factory=dict)
    scores: Mapping[str, pl.Series] = field(default_factory=dict)
    scored: pl.Series | None = None
    verdicts: pl.DataFrame | None = None
    added: pl.DataFrame | None = None
    errors: Sequence[RowError] = ()
    comments: Mapping[int, str] = field(default_factory=dict)


VERDICT_SCHEMA: dict[str, pl.DataType] = {
    "row": pl.UInt32(),
    "verdict": pl.String(),
    "reason": pl.String(),
    "detail": pl.String(),
    "ref_id": pl.String(),
}


ADDED_SCHEMA: dict[str, pl.DataType] = {
    "spans": pl.List(pl.Struct({"row": pl.UInt32(), "start": pl.Int32(), "stop": pl.Int32(), "trained": pl.Boolean()})),
    "context_replies": pl.Int32(),
    "bundle": pl.String(),
    "sample_index": pl.Int32(),
    "turn_index": pl.Int32(),
    "group_size": pl.Int32(),
    "info_json": pl.String(),
}
"""What an added row may say besides parent and messages; a column may be left out, and be null in single rows.

spans: its tokens, put together from [start, stop) of rows of the frame, as they were sampled; they train where they
trained before and `trained` is true. Null: the messages are encoded as text that nobody sampled.
context_replies: first replies of such a text that do not train. bundle: rows of the operator with the same text here
become one new group; null: a group of its own. sample_index: place in the bundle, null: the next one. turn_index:
segment of the episode, null: 0. group_size: samples of the bundle when complete, null: its distinct sample_index.
info_json: JSON object for the row."""


class Operator(ABC, Generic[ConfigT]):
    """One step of a curation pipeline. Subclasses set `Config` and `version` and implement two methods.

    Operators that need set-up (a worker pool, a loaded table) do it lazily in `apply` and free it in `close`.
    """

    Config: ClassVar[type[OperatorConfig]]
    version: ClassVar[int] = 1
    """Raised whenever the meaning of the operator changes; part of its fingerprint."""
    requires: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(module, extra) pairs that must be importable; checked before anything runs."""

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    @abstractmethod
    def contract(self) -> Contract:
        """What this configured operator reads and writes. Must not import heavy packages."""

    @abstractmethod
    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Judge the rows of `frame`, which holds the contract's `reads` and `experience_id`, `group_id`, `task_id`.

        Pure: the same frame and context give the same result, in any batch split that keeps the scope whole.
        """

    def files(self) -> tuple[Path, ...]:
        """Files that the operator reads besides its frame.

        They must be there when a plan is compiled; their content is part of the operator's fingerprint.
        """
        return ()

    def close(self) -> None:
        """Free what `apply` set up. The default holds nothing."""
        return


def operator_type(operator: Operator[Any]) -> str:
    """Registry name of a configured operator."""
    return operator.config.type
