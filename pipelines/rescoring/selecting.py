"""Which rows are to be scored: those a condition names, without those that this operator has scored already."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl
import pyarrow as pa

from buffer_engine.errors import UsageError
from buffer_engine.inspect import QueryError, connect_store
from buffer_engine.store.base import ExperienceStore
from operators.plan import OperatorPlan
from pipelines.curate import polars_frame

SHOWN = 5
"""Rows that a message about conflicting versions names."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows to score.

    Attributes:
        rows: experience_id, run_id, group_id and pending (to be scored and written) in order of arrival.
        failed: selected rollouts that failed; they are never scored.
        done: selected rows that this operator scored before.
        before: experience_id, value: current value of the component of selected rows that have one.
    """

    rows: pl.DataFrame
    failed: int
    done: int
    before: pl.DataFrame

    @property
    def pending(self) -> int:
        """Rows to score and write."""
        return int(self.rows["pending"].sum())


def select_rows(
    store: ExperienceStore, *, where: str | None, scores: pl.DataFrame, component: str, author: str, version: int | None
) -> Selection:
    """Look for the rows.

    Args:
        where: SQL condition on the view `experiences`; None: all rows.
        scores: experience_id, name, version, value, author of all stored scores of the component and its metrics.
        version: the version that new scores shall have; None: the next of each row.

    Raises:
        UsageError: the condition cannot be evaluated, no row meets it, or rows have that version already.
    """
    columns = ["experience_id", "run_id", "group_id", "error"]
    rows = polars_frame(store.table("rollouts", columns=columns))
    if where is not None:
        try:
            with connect_store(store) as inspection:
                found = inspection.query(f"SELECT experience_id FROM experiences WHERE (\n{where}\n)")
        except QueryError as error:
            raise UsageError(f"--where {where!r}: {error}") from error
        rows = rows.join(polars_frame(found), on="experience_id", how="semi", maintain_order="left")
    if rows.is_empty():
        raise UsageError(f"{store.path}: no row {'is stored' if where is None else f'meets --where {where!r}'}")
    fine = rows.filter(pl.col("error").is_null()).drop("error")
    own = scores.filter((pl.col("name") == component) & (pl.col("author") == author))
    fine = fine.with_columns(pending=~pl.col("experience_id").is_in(own["experience_id"].to_list()))
    if version is not None:
        _check_versions(fine, scores, own, component, version)
    current = scores.filter(pl.col("name") == component).sort("version").unique("experience_id", keep="last")
    before = current.select("experience_id", "value").join(fine, on="experience_id", how="semi")
    return Selection(fine, rows.height - fine.height, fine.height - int(fine["pending"].sum()), before)


def component_scores(store: ExperienceStore, plan: OperatorPlan) -> pl.DataFrame:
    """All stored scores of the components that the plan writes."""
    columns = ["experience_id", "name", "version", "value", "weight", "author"]
    return polars_frame(store.table("scores", columns=columns)).filter(pl.col("name").is_in(list(plan.components)))


def parts(selection: Selection, plan: OperatorPlan, rows: int) -> list[pl.DataFrame]:
    """What is pending in parts of about `rows` rows, cut between groups.

    A group operator is shown whole groups, and an operator of the whole frame everything, also the rows that are
    scored already.

    Raises:
        UsageError: the operator compares all rows, and there are more than one part holds.
    """
    scopes = {step.contract.scope for step in plan.steps}
    chosen = selection.rows
    if not selection.pending:
        return []
    if "frame" in scopes:
        if chosen.height > rows:
            name = next(step.id for step in plan.steps if step.contract.scope == "frame")
            raise UsageError(
                f"operator {name!r} compares all rows with each other, and {chosen.height:,} are more than the "
                f"{rows:,} of one part: narrow --where, or raise --chunk-rows"
            )
        return [chosen]
    group = ["run_id", "group_id"]
    if "group" in scopes:
        pending = chosen.filter("pending").select(group).unique()
        chosen = chosen.join(pending, on=group, how="semi", maintain_order="left")
    else:
        chosen = chosen.filter("pending")
    found: list[pl.DataFrame] = []
    collected: list[pl.DataFrame] = []
    height = 0
    for _, members in chosen.group_by(group, maintain_order=True):
        if height and height + members.height > rows:
            found.append(pl.concat(collected))
            collected, height = [], 0
        collected.append(members)
        height += members.height
    return [*found, pl.concat(collected)]


def _check_versions(rows: pl.DataFrame, scores: pl.DataFrame, own: pl.DataFrame, component: str, version: int) -> None:
    """Every row must still be able to get this version."""
    if version < 1:
        raise UsageError(f"--name {component}@v{version}: versions count from 1")
    elsewhere = own.filter(pl.col("version") != version).join(rows, on="experience_id", how="semi")
    if elsewhere.height:
        row_id, has = elsewhere.select("experience_id", "version").row(0)
        raise UsageError(
            f"--name {component}@v{version}: {elsewhere.height:,} rows have this operator's score as another version, "
            f"for example {row_id} as version {has}"
        )
    taken = (
        scores.filter(pl.col("version") >= version)
        .join(rows.filter("pending"), on="experience_id", how="semi")
        .sort("version")
        .unique(["experience_id", "name"], keep="last", maintain_order=True)
    )
    if taken.height:
        said = ", ".join(
            f"{row_id} (version {has} of {name} by {author})"
            for row_id, has, name, author in taken.select("experience_id", "version", "name", "author")
            .head(SHOWN)
            .rows()
        )
        more = f" and {taken.height - SHOWN:,} more" if taken.height > SHOWN else ""
        newest = int(taken["version"].max())  # type: ignore[arg-type]
        raise UsageError(
            f"--name {component}@v{version}: taken on {said}{more}; nothing was written. Write @v{newest + 1}, or no "
            "version for the next of each row"
        )


def ids_of(frame: pl.DataFrame) -> pa.Array:
    """The ids of a frame as Arrow text."""
    return pa.array(frame["experience_id"].to_list(), pa.string())
