"""Operators that misbehave, each in one way, for the tests of the engine and of the contract suite."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import polars as pl

from operators.base import (
    ADDED_SCHEMA,
    Context,
    Contract,
    Operator,
    OperatorConfig,
    Result,
    RowError,
    ScoreOperatorConfig,
)
from operators.registry import OPERATORS
from operators.verdicts import verdicts_of


class FailingConfig(ScoreOperatorConfig):
    bad: tuple[str, ...] = ()
    scope: Literal["row", "group", "frame"] = "row"


class Failing(Operator[FailingConfig]):
    """Raises when it sees a bad row; otherwise scores 1 and rejects what is called `drop`."""

    Config = FailingConfig
    seen: ClassVar[list[list[str]]] = []

    def contract(self) -> Contract:
        return Contract(
            reads=frozenset(("response",)), writes={"length": pl.UInt32()}, scores=(self.config.name,),
            scope=self.config.scope, drops=True, cost="python",
        )  # fmt: skip

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        ids = frame["experience_id"].to_list()
        self.seen.append(ids)
        for name in ids:
            if name in self.config.bad:
                raise ValueError(f"cannot read {name}")
        return Result(
            columns={"length": frame["response"].str.len_chars()},
            scores={self.config.name: pl.Series([1.0] * frame.height, dtype=pl.Float64)},
            verdicts=verdicts_of(frame, "reject", pl.when(pl.col("response") == "drop").then(pl.lit("asked"))),
        )


class BrokenConfig(ScoreOperatorConfig):
    fault: str


class Broken(Operator[BrokenConfig]):
    """Breaks its contract in the way `fault` names."""

    Config = BrokenConfig

    def contract(self) -> Contract:
        scores = (self.config.name,) if self.config.fault.startswith("score") else ()
        writes: dict[str, pl.DataType] = {"made": pl.Int64()} if self.config.fault.startswith("column") else {}
        return Contract(
            reads=frozenset(("response",)), writes=writes, scores=scores, cost="python",
            drops=self.config.fault not in ("undeclared_door",), adds=self.config.fault.startswith("added"),
        )  # fmt: skip

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        height = frame.height
        rejected = verdicts_of(frame, "reject", pl.lit("x"))
        zeros = pl.Series([0.0] * height, dtype=pl.Float64)
        name = self.config.name
        results = {
            "undeclared_door": lambda: Result(verdicts=rejected),
            "unknown_verdict": lambda: Result(verdicts=rejected.with_columns(verdict=pl.lit("drop"))),
            "no_reason": lambda: Result(verdicts=rejected.with_columns(reason=pl.lit(""))),
            "two_doors": lambda: Result(verdicts=pl.concat([rejected, rejected])),
            "verdict_and_error": lambda: Result(verdicts=rejected, errors=[RowError(0, "no")]),
            "row_beyond": lambda: Result(verdicts=rejected.with_columns(pl.col("row") + height)),
            "wrong_schema": lambda: Result(verdicts=rejected.drop("ref_id")),
            "column_undeclared": lambda: Result(columns={"other": zeros}),
            "column_missing": Result,
            "column_short": lambda: Result(columns={"made": zeros.cast(pl.Int64).head(height - 1)}),
            "column_type": lambda: Result(columns={"made": zeros}),
            "score_missing": Result,
            "score_nan": lambda: Result(scores={name: zeros.set(zeros.is_finite(), float("nan"))}),
            "score_inf": lambda: Result(scores={name: zeros.set(zeros.is_finite(), float("inf"))}),
            "score_type": lambda: Result(scores={name: zeros.cast(pl.Int64)}),
            "score_undeclared": lambda: Result(scores={name: zeros, "other": zeros}),
            "score_flag_null": lambda: Result(
                scores={name: zeros}, scored=pl.Series([None] * height, dtype=pl.Boolean)
            ),
            "added_orphan": lambda: Result(added=pl.DataFrame({"parent": [height], "messages": [[]]})),
            "added_column": lambda: Result(added=pl.DataFrame({"parent": [0], "messages": [[]], "tokens": [[1]]})),
            "added_type": lambda: Result(added=pl.DataFrame({"parent": [0], "messages": [[]], "bundle": [1]})),
            "added_span": lambda: Result(added=spans_of(0, height)),
        }
        return results[self.config.fault]()


def spans_of(parent: int, row: int) -> pl.DataFrame:
    """One added row made of the first token of `row`."""
    span = {"row": row, "start": 0, "stop": 1, "trained": True}
    schema = {"parent": pl.UInt32(), "messages": pl.List(pl.Struct({"role": pl.String()}))}
    return pl.DataFrame(
        {"parent": [parent], "messages": [[]], "spans": [[span]]}, schema=schema | {"spans": ADDED_SCHEMA["spans"]}
    )


class CopyingConfig(OperatorConfig):
    bad: str = ""


class Copying(Operator[CopyingConfig]):
    """Adds to each row a copy made of its tokens; raises when it sees the bad row."""

    Config = CopyingConfig

    def contract(self) -> Contract:
        return Contract(reads=frozenset(("response",)), adds=True, cost="python")

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        if self.config.bad in frame["experience_id"].to_list():
            raise ValueError("bad row")
        return Result(added=pl.concat([spans_of(row, row) for row in range(frame.height)] or [spans_of(0, 0).clear()]))


class ChaosConfig(ScoreOperatorConfig):
    salt: int
    scope: Literal["row", "group"] = "row"


class Chaos(Operator[ChaosConfig]):
    """Sends each row through a door that depends on its id only; some rows raise, some are called failed."""

    Config = ChaosConfig

    def contract(self) -> Contract:
        return Contract(
            reads=frozenset(("response",)), scores=(self.config.name,), scope=self.config.scope,
            drops=True, holds=True, masks=True, cost="python",
        )  # fmt: skip

    def fate(self, experience_id: str) -> int:
        return (int(experience_id[1:]) * 7919 + self.config.salt * 104729) % 11

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        fates = [self.fate(name) for name in frame["experience_id"]]
        if 0 in fates:
            raise RuntimeError("chaos")
        chosen = frame.with_columns(fate=pl.Series(fates, dtype=pl.Int64))
        parts = [
            verdicts_of(chosen, verdict, pl.when(pl.col("fate") == fate).then(pl.lit("chaos")))
            for fate, verdict in ((1, "reject"), (2, "hold"), (3, "mask"))
        ]
        return Result(
            scores={self.config.name: pl.Series([None if fate == 5 else 1.0 for fate in fates], dtype=pl.Float64)},
            scored=pl.Series([fate != 6 for fate in fates], dtype=pl.Boolean),
            verdicts=pl.concat(parts),
            errors=[RowError(row, "said so") for row, fate in enumerate(fates) if fate == 4],
        )


class SneakyConfig(OperatorConfig):
    how: str


class Sneaky(Operator[SneakyConfig]):
    """Looks pure and is not."""

    Config = SneakyConfig

    def __init__(self, config: SneakyConfig) -> None:
        super().__init__(config)
        self._calls = 0

    def contract(self) -> Contract:
        return Contract(reads=frozenset(("response",)), writes={"made": pl.Int64()}, cost="python")

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        self._calls += 1
        place = pl.Series(range(frame.height), dtype=pl.Int64)
        made: dict[str, Any] = {
            "state": pl.Series([self._calls] * frame.height, dtype=pl.Int64),
            "order": place,
            "batch": pl.Series([frame.height] * frame.height, dtype=pl.Int64),
            "reads": pl.Series([len(frame.columns)] * frame.height, dtype=pl.Int64),
        }
        return Result(columns={"made": made[self.config.how]})


def register(monkeypatch: Any) -> None:
    """Make these operators loadable by name for one test."""
    for name, target in (
        ("failing", "Failing"),
        ("broken", "Broken"),
        ("chaos", "Chaos"),
        ("sneaky", "Sneaky"),
        ("copying", "Copying"),
    ):
        monkeypatch.setitem(OPERATORS.builtin, name, f"odd_operators:{target}")
