"""Which stored rows a dry run goes over, and in which passes: whole groups, in order of arrival, sampled if asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from buffer_engine.errors import UsageError, did_you_mean
from buffer_engine.identity import stable_digest
from buffer_engine.store.base import ExperienceStore
from pipelines.curate import PASS_ROWS, polars_frame

MADE_ELSEWHERE = ("explorer", "import")
"""`made_by` of rows that no operator made; a dry run begins with these, as a first curation does."""


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """The rows of a dry run.

    Attributes:
        passes: (run_id, experience ids), each of at most `PASS_ROWS` rows unless one group is larger.
        rows, groups: how many there are in all passes.
        available: training rows that no operator made, from which the sample was drawn.
        made_by_operators: rows that were left out because operators made them in earlier passes.
    """

    passes: Sequence[tuple[str, Sequence[str]]]
    rows: int
    groups: int
    available: int
    made_by_operators: int


def choose_rows(
    store: ExperienceStore, *, run_id: str | None = None, sample: int | None = None, seed: int = 0
) -> ChosenRows:
    """Training rows of a store as passes.

    Args:
        run_id: only rows of this run; None: of all, each run in passes of its own.
        sample: at most so many rows, of all runs and task sets in proportion, whole groups by `seed`; at least one
            group. None: all.

    Raises:
        UsageError: there is no such run, or no row; `sample` is below 1.
    """
    if sample is not None and sample < 1:
        raise UsageError(f"a sample of {sample} rows: it must be at least 1")
    columns = ["experience_id", "run_id", "group_id", "task_id", "partition", "made_by"]
    rows = polars_frame(store.table("rollouts", columns=columns)).filter(pl.col("partition") == "train")
    if run_id is not None:
        runs = rows["run_id"].unique().to_list()
        if run_id not in runs:
            raise UsageError(f"{store.path}: no training rows of a run {run_id!r}: {did_you_mean(run_id, runs)}")
        rows = rows.filter(pl.col("run_id") == run_id)
    given = rows.filter(pl.col("made_by").is_in(MADE_ELSEWHERE))
    if given.is_empty():
        raise UsageError(f"{store.path}: there are no training rows to go over; explore or import some first")
    chosen = given if sample is None else _sampled(store, given, sample, seed)
    return ChosenRows(
        _passes(chosen),
        chosen.height,
        chosen.select("run_id", "group_id").n_unique(),
        given.height,
        rows.height - given.height,
    )


def _sampled(store: ExperienceStore, rows: pl.DataFrame, most: int, seed: int) -> pl.DataFrame:
    """Groups in an order in which every first part has all runs and task sets in proportion, as many as fit."""
    tasks = polars_frame(store.table("tasks", columns=["task_id", "taskset"])).unique("task_id", keep="first")
    groups = rows.group_by("run_id", "group_id", maintain_order=True).agg(
        rows=pl.len(), task_id=pl.col("task_id").first()
    )
    draws = [stable_digest(seed, run, group) for run, group in groups.select("run_id", "group_id").iter_rows()]
    stratum = ["run_id", "taskset"]
    groups = (
        groups.join(tasks, on="task_id", how="left", maintain_order="left")
        .with_columns(draw=pl.Series(draws, dtype=pl.String))
        .sort("draw")
        .with_columns(
            place=((pl.col("rows").cum_sum() - pl.col("rows") / 2) / pl.col("rows").sum()).over(stratum),
        )
        .sort("place", "draw")
        .with_row_index("rank")
        .filter((pl.col("rows").cum_sum() <= most) | (pl.col("rank") == 0))
    )
    return rows.join(groups.select("run_id", "group_id"), on=["run_id", "group_id"], how="semi", maintain_order="left")


def _passes(rows: pl.DataFrame) -> list[tuple[str, Sequence[str]]]:
    """Whole groups in order of arrival, cut as `Curator` cuts them."""
    passes: list[tuple[str, list[str]]] = []
    groups = rows.group_by("run_id", "group_id", maintain_order=True).agg("experience_id")
    for (run,), of_run in groups.group_by("run_id", maintain_order=True):
        chosen: list[str] = []
        for ids in of_run["experience_id"].to_list():
            if len(chosen) >= PASS_ROWS:
                passes.append((str(run), chosen))
                chosen = []
            chosen.extend(ids)
        passes.append((str(run), chosen))
    return list(passes)
