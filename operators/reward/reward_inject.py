"""reward_inject: rewards from a file: of people, of another system, or late ones."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import polars as pl
from pydantic import Field, model_validator

from buffer_engine.errors import OperatorError
from operators.base import Context, Contract, Operator, Result, ScoreOperatorConfig
from operators.table_files import read_table
from operators.verdicts import verdicts_of


class RewardInjectConfig(ScoreOperatorConfig):
    """Where the rewards are, how they find their rows, and what happens otherwise."""

    path: str = Field(description="Parquet, CSV or JSON Lines file, one line a reward")
    on: str = Field("experience_id", description="column of the rows that finds the reward: an id, or an info key")
    key: str | None = Field(None, description="column of the file with the same values; default: the same name")
    value: str = Field("reward", description="column of the file with the number")
    comment: str | None = Field(None, description="column of the file with a text to keep beside the score")
    missing: Literal["skip", "null", "reject", "hold"] = Field(
        "skip",
        description="a row without a line: leave its score as it is, score it null, reject it, or hold it",
    )
    conflicts: Literal["error", "last", "mean", "min", "max"] = Field(
        "error", description="several lines for one row: stop, or take the last by `order`, or combine"
    )
    order: str | None = Field(None, description="column of the file that says which line is last; only for that")

    @model_validator(mode="after")
    def _order_is_used(self) -> RewardInjectConfig:
        if (self.conflicts == "last") != (self.order is not None):
            raise ValueError("conflicts: last needs `order`, and only conflicts: last takes it")
        return self


class RewardInject(Operator[RewardInjectConfig]):
    """Scores rows with the numbers of a file, found by id or by any other column.

    A line with a null number scores its row null: looked at, and could not be scored. Two lines for one key stop the
    pass unless `conflicts` says which counts; equal lines are no conflict. Combining leaves null numbers out. A number
    that is NaN or infinite, a key that is null, and keys of another type than the rows' stop the pass. A row without a
    line is not scored, scored null, rejected (`no_reward`) or held (`no_reward`). Lines for no row are not looked at.
    The file counts in the operator's fingerprint.
    """

    Config = RewardInjectConfig

    def __init__(self, config: RewardInjectConfig) -> None:
        super().__init__(config)
        self._known: pl.DataFrame | None = None

    def contract(self) -> Contract:
        """Reads the joining column; scores its own component; may reject or hold."""
        missing = self.config.missing
        return Contract(
            reads=frozenset((self.config.on,)),
            scores=(self.config.name,),
            drops=missing == "reject",
            holds=missing == "hold",
            cost="python",
        )

    def files(self) -> tuple[Path, ...]:
        """The file with the rewards."""
        return (Path(self.config.path).expanduser(),)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Look up every row."""
        if self._known is None:
            self._known = self._load()
        wanted, given = frame.schema[self.config.on], self._known.schema["key"]
        if wanted != given and not (wanted.is_integer() and given.is_integer()):
            raise OperatorError(f"{self._name()}: its key is {given}, the rows' {self.config.on!r} is {wanted}")
        keys = frame.select(key=pl.col(self.config.on).cast(given))
        found = keys.join(self._known, on="key", how="left", maintain_order="left")
        there = found["found"].fill_null(False)
        name = self.config.name
        scores = {name: found["value"].alias(name)}
        comments = {row: text for row, text in enumerate(found["comment"]) if text is not None}
        if self.config.missing == "null":
            return Result(scores=scores, comments=comments)
        if self.config.missing == "skip":
            return Result(scores=scores, scored=there.alias("scored"), comments=comments)
        reason = pl.when(pl.col("found").is_null()).then(pl.lit("no_reward"))
        detail = pl.format("no line for {} {}", pl.lit(self.config.on), "key")
        verdicts = verdicts_of(found, self.config.missing, reason, detail=detail)
        return Result(scores=scores, scored=there.alias("scored"), verdicts=verdicts, comments=comments)

    def _name(self) -> str:
        return f"operator {self.config.name!r}: {self.config.path}"

    def _load(self) -> pl.DataFrame:
        """key, value, comment, found: one line a key."""
        config = self.config
        key = config.key or config.on
        extra = [name for name in (config.comment, config.order) if name is not None]
        table = read_table(self.files()[0], columns=(key, config.value, *extra), operator=config.name)
        if not (table.schema[config.value].is_numeric() or table.schema[config.value] == pl.Null):
            raise OperatorError(f"{self._name()}: column {config.value!r} is {table.schema[config.value]}, no number")
        lines = table.select(
            key=key,
            value=pl.col(config.value).cast(pl.Float64),
            comment=pl.lit(None, pl.String) if config.comment is None else pl.col(config.comment).cast(pl.String),
            order=pl.lit(0) if config.order is None else pl.col(config.order),
        )
        bad = lines.filter(pl.col("value").is_not_null() & ~pl.col("value").is_finite())
        if bad.height:
            raise OperatorError(f"{self._name()}: the reward of {bad['key'][0]!r} is {bad['value'][0]}, no number")
        if lines["key"].null_count():
            raise OperatorError(f"{self._name()}: {lines['key'].null_count()} lines have no {key!r}")
        return self._one_each(lines).with_columns(found=pl.lit(True))

    def _one_each(self, lines: pl.DataFrame) -> pl.DataFrame:
        columns = ("key", "value", "comment")
        how = self.config.conflicts
        if how == "last":
            return (
                lines.sort("order", maintain_order=True).unique("key", keep="last", maintain_order=True).select(columns)
            )
        distinct = lines.select(columns).unique(["key", "value"], keep="first", maintain_order=True)
        doubled = distinct.filter(pl.col("key").is_duplicated())
        if how == "error" and doubled.height:
            first = doubled["key"][0]
            values = doubled.filter(pl.col("key") == first)["value"].to_list()
            raise OperatorError(f"{self._name()}: {first!r} has several rewards, {values}: set `conflicts`")
        if how == "error":
            return distinct
        value = {"mean": pl.col("value").sort().mean(), "min": pl.col("value").min(), "max": pl.col("value").max()}[how]
        return lines.group_by("key", maintain_order=True).agg(
            value=value, comment=pl.col("comment").drop_nulls().first()
        )
