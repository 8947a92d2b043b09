"""group_complete: groups with too few members."""

from __future__ import annotations

from typing import Literal

import polars as pl
from pydantic import Field

from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.verdicts import verdicts_of


class GroupCompleteConfig(OperatorConfig):
    """How many members a group must have, and what becomes of it otherwise."""

    min: int | None = Field(None, ge=1, description="fewest samples; null: the group's own group_size")
    max: int | None = Field(None, ge=1, description="most samples; those with the highest sample_index go")
    verdict: Literal["reject", "hold"] = Field(
        "reject", description="what becomes of a group with too few: rejected, or held until somebody releases it"
    )
    over: Literal["survivors", "all"] = Field(
        "survivors", description="which members count: those still there, or also those that operators before took out"
    )


class GroupComplete(Operator[GroupCompleteConfig]):
    """Rejects or holds groups with too few samples (`incomplete`), and what a group has too many of (`surplus`).

    A sample is a distinct sample_index: the turns of one episode count once. Of a group with more than `max` samples,
    those with the lowest sample_index stay. With `over: all` rows that earlier operators took out count, so that only
    samples which never arrived are missed; only living rows are judged, and a surplus is counted among these. Failed
    rollouts are members of no group here: the intake rejects them before.
    """

    Config = GroupCompleteConfig

    def contract(self) -> Contract:
        """Reads size and place; needs whole groups; rejects or holds."""
        alive = ("alive",) if self.config.over == "all" else ()
        return Contract(
            reads=frozenset(("group_size", "sample_index", *alive)),
            scope="group",
            drops=self.config.verdict == "reject" or self.config.max is not None,
            holds=self.config.verdict == "hold",
            over=self.config.over,
        )

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Count the samples of every group."""
        living = pl.col("alive") if self.config.over == "all" else pl.lit(True)
        wanted = pl.col("group_size").cast(pl.Int64) if self.config.min is None else pl.lit(self.config.min)
        sample = pl.when("living").then("sample_index")
        counted = frame.with_columns(living=living).with_columns(
            samples=pl.col("sample_index").n_unique().over("group_id"),
            wanted=wanted,
            rank=sample.rank("dense").over("group_id"),
        )
        few = pl.col("living") & (pl.col("samples") < pl.col("wanted"))
        detail = pl.format("{} of {} samples", "samples", "wanted")
        verdicts = [verdicts_of(counted, self.config.verdict, pl.when(few).then(pl.lit("incomplete")), detail=detail)]
        if self.config.max is not None:
            many = pl.col("living") & ~few & (pl.col("rank") > self.config.max)
            detail = pl.format("sample {} of at most {}", "rank", pl.lit(self.config.max))
            verdicts.append(verdicts_of(counted, "reject", pl.when(many).then(pl.lit("surplus")), detail=detail))
        return Result(verdicts=pl.concat(verdicts))
