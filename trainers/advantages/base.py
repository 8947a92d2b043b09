"""What an advantage is: a pure function of a frame of rewards, with its oddities counted.

Advantages are derived: they are computed when a batch is formed, from the rewards in force at that moment, and go into
the batch's manifest. Everything is float64, because a float32 test for "all rewards equal" fails on eight times 0.1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import polars as pl

from buffer_engine.config import ComponentConfig
from buffer_engine.errors import SchemaError
from trainers.registry import ADVANTAGES

RELATIVE_TOLERANCE = 1e-9
"""Rewards whose range is at most this times max(1, |mean|) count as equal."""

COLUMNS = ("experience_id", "group_id", "reward", "error")


class AdvantageConfig(ComponentConfig):
    """Base of the configuration of an advantage; `type` names it."""

    type: Any  # a Literal in every subclass


@dataclass(frozen=True, slots=True)
class AdvantageResult:
    """Advantages of a frame's rows.

    Attributes:
        advantages: Float64, one per row of the frame, in its order; null for a row that has an error, or no reward
            where the advantage needs one: such a row must not be trained.
        counts: rows per oddity: `unscored` (null advantage), `singleton` (the only valid row of its group: 0),
            `zero_variance` (all valid rewards of the group are equal: 0).
    """

    advantages: pl.Series
    counts: Mapping[str, int]


ConfigT = TypeVar("ConfigT", bound=AdvantageConfig)


class Advantage(ABC, Generic[ConfigT]):
    """One way to turn rewards into advantages."""

    Config: ClassVar[type[AdvantageConfig]]
    needs_reward: ClassVar[bool] = True
    needs_groups: ClassVar[bool] = True

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    @abstractmethod
    def compute(self, frame: pl.DataFrame) -> AdvantageResult:
        """Advantages of `frame` (experience_id, group_id, reward Float64, error String), whole groups together."""


def compute_advantages(config: AdvantageConfig, frame: pl.DataFrame) -> AdvantageResult:
    """Advantages of the rows of `frame` as `config` defines them.

    Args:
        frame: columns experience_id, group_id, reward (null: not scored), error (null: none); groups may be in any
            order but must be whole.

    Raises:
        SchemaError: a column is missing, an id is null or twice there, or a reward is NaN or infinite.
        UnknownComponentError: `config.type` names no advantage.
    """
    missing = [name for name in COLUMNS if name not in frame.columns]
    if missing:
        raise SchemaError(f"advantages need the columns {', '.join(COLUMNS)}; {', '.join(missing)} not among them")
    frame = frame.select(
        pl.col("experience_id"), pl.col("group_id"), pl.col("reward").cast(pl.Float64), pl.col("error").cast(pl.String)
    )
    for name in ("experience_id", "group_id"):
        if frame[name].null_count():
            raise SchemaError(f"advantages: {frame[name].null_count()} of {frame.height} rows have no {name}")
    if frame["experience_id"].n_unique() != frame.height:
        twice = frame.filter(pl.col("experience_id").is_duplicated())["experience_id"][0]
        raise SchemaError(f"advantages: row {twice} is in the frame more than once; a baseline would count it twice")
    bad = frame.filter(pl.col("reward").is_not_null() & ~pl.col("reward").is_finite())
    if bad.height:
        raise SchemaError(f"advantages: reward of row {bad['experience_id'][0]} is {bad['reward'][0]}, not a number")
    advantage: Advantage[AdvantageConfig] = ADVANTAGES.load(config.type)(config)
    return advantage.compute(frame)


def group_statistics(frame: pl.DataFrame) -> pl.DataFrame:
    """`frame` with the statistics of each row's group over its valid rows (no error, reward not null).

    Adds valid (bool), baseline_n (UInt32), total, mean, spread (sample standard deviation, null below two rows),
    singleton and flat (bool, only on valid rows; flat: two or more valid rewards, all equal within the tolerance).
    """
    valid = pl.col("reward").is_not_null() & pl.col("error").is_null()
    frame = frame.with_columns(valid=valid).with_columns(counted=pl.when("valid").then("reward"))
    counted = pl.col("counted")
    group = "group_id"
    frame = frame.with_columns(
        baseline_n=counted.count().over(group),
        total=counted.sum().over(group),
        mean=counted.mean().over(group),
        spread=counted.std(ddof=1).over(group),
        extent=(counted.max() - counted.min()).over(group),
    )
    limit = RELATIVE_TOLERANCE * pl.max_horizontal(pl.lit(1.0), pl.col("mean").abs())
    return frame.with_columns(
        singleton=pl.col("valid") & (pl.col("baseline_n") == 1),
        flat=pl.col("valid") & (pl.col("baseline_n") > 1) & (pl.col("extent") <= limit),
    )


def grouped_result(frame: pl.DataFrame, advantage: pl.Expr) -> AdvantageResult:
    """`advantage` over a frame of `group_statistics`: 0 for singletons and flat groups, null for rows not valid."""
    still = pl.col("singleton") | pl.col("flat")
    values = frame.select(
        advantage=pl.when(~pl.col("valid")).then(None).when(still).then(0.0).otherwise(advantage).cast(pl.Float64)
    )["advantage"]
    counts = {
        "unscored": int((~frame["valid"]).sum()),
        "singleton": int(frame["singleton"].sum()),
        "zero_variance": int(frame["flat"].sum()),
    }
    return AdvantageResult(values, counts)
