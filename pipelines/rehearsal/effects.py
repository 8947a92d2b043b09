"""What a pipeline would do to what trains: rows, lengths, rewards and advantages, before and after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import polars as pl

from pipelines.spec import Spec
from trainers.advantages import compute_advantages
from trainers.algorithms.base import Algorithm
from trainers.registry import ALGORITHMS

Side = Literal["before", "after"]
Numbers = Mapping[str, float | None]


def algorithm_of(spec: Spec) -> Algorithm[Any] | None:
    """The algorithm that the specification trains with; None when it has no trainer."""
    trainer: Any = spec.trainer
    return None if trainer is None else ALGORITHMS.load(trainer.algorithm.type)(trainer.algorithm)


def effect(rows: pl.DataFrame, side: Side, algorithm: Algorithm[Any] | None) -> Numbers:
    """Numbers of what would train, in the order in which to read them.

    Advantages are the algorithm's, over the rows of each group that are there on this side. `before` are all rows that
    did not fail, with the rewards they have in the store now; `after` are the rows kept, with the rewards they would
    have. A row that is masked stays in its group and trains on no token.

    Args:
        rows: `Rehearsal.rows`.
    Returns:
        Counts, tokens, rewards (of rows that have one) and advantages; None where there is nothing to take a mean of.
    """
    if side == "before":
        rows = rows.filter(pl.col("error").is_null()).with_columns(reward="reward_before", masked=pl.lit(False))
    else:
        rows = rows.filter(pl.col("verdict") == "keep").with_columns(reward="reward_after")
    length = rows["tokens"]
    rewards = rows["reward"].drop_nulls()
    numbers: dict[str, float | None] = {
        "rows": rows.height,
        "groups": rows.select("run_id", "group_id").n_unique() if rows.height else 0,
        "tasks": rows["task_id"].n_unique(),
        "trained tokens": _number(rows.filter(~pl.col("masked"))["tokens"].sum()),
        "tokens with prompts": _number(rows["total_tokens"].sum()),
        "mean length": _number(length.mean()),
        "median length": _number(length.median()),
        "95th percentile of length": _number(length.quantile(0.95, "nearest")),
        "rows without a reward": rows["reward"].null_count(),
        "mean reward": _number(rewards.mean()),
        "standard deviation of reward": _number(rewards.std(ddof=0)),
    }
    if algorithm is not None and algorithm.needs.advantages:
        numbers |= _advantages(rows, algorithm)
    return numbers


def _advantages(rows: pl.DataFrame, algorithm: Algorithm[Any]) -> dict[str, float | None]:
    # Group ids are those of a run; rows of several runs must not share a baseline.
    shaped = rows.select(
        "experience_id", "error", "reward", group_id=pl.concat_str("run_id", "group_id", separator="/")
    )
    result = compute_advantages(algorithm.config.advantage, shaped)
    values = result.advantages.drop_nulls()
    return {
        "rows alone in their group": result.counts["singleton"],
        "rows in groups without a difference": result.counts["zero_variance"],
        "mean size of the advantage": _number(values.abs().mean()),
        "rows with an advantage that is not 0": int((values != 0).sum()),
    }


def _number(value: Any) -> float | None:
    return value
