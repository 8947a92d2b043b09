"""Scores of an operator for rows that are stored already, also for rows that were trained on.

Each part is one transaction. The author of a score is the operator's type and a digest of what it is (class, version,
parameters, files), so a row says itself whether this very operator has scored it: a repeat, after a kill or not, does
what is missing and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.errors import ConfigError, KeyConflictError, StoreBusyError, UsageError
from buffer_engine.identity import stable_digest
from buffer_engine.schema import SCORES
from buffer_engine.store.base import ExperienceStore
from operators.engine import CurationResult, run_operators
from operators.frame import build_frame
from operators.plan import OperatorPlan
from pipelines.curate import polars_frame
from pipelines.rescoring.selecting import Selection, ids_of, parts

_ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Rescored:
    """What scoring again did, or would do.

    Attributes:
        scored: rows that got a score.
        unscored: rows that the operator's `where` or the operator itself left out; they have no new score.
        errors: (experience_id, message) of rows on which it failed; a repeat tries them again.
        after: experience_id, value: the new values; null could not be scored.
        version: of the store, at which the last part is visible; None: nothing was written.
    """

    scored: int
    unscored: int
    errors: Sequence[tuple[str, str]]
    after: pl.DataFrame
    version: int | None


def author_of(plan: OperatorPlan) -> str:
    """Who scores: the type of the score operator and a digest of all operators of the plan, ids left aside."""
    return f"{plan.steps[-1].type}@{stable_digest([step.fingerprint for step in plan.steps], size=6)}"


def weight_in_force(plan: OperatorPlan, scores: pl.DataFrame) -> float | None:
    """Weight of the new scores: what the file says, else what the component has in the store, else the default.

    Args:
        scores: experience_id, name, version and weight of the component's stored scores.
    Returns:
        None for a metric.

    Raises:
        ConfigError: the file says no weight, and rows of the store have different ones.
    """
    step = plan.steps[-1]
    if "weight" not in step.operator.config.model_fields_set:
        stored = scores.filter(pl.col("name") == step.id).sort("version").unique("experience_id", keep="last")
        weights = stored["weight"].fill_null(0.0).unique().sort().to_list()
        if len(weights) > 1:
            raise ConfigError.one(
                f"rows have component {step.id!r} with the weights {', '.join(f'{value:g}' for value in weights)}",
                path="weight",
                fix="write the weight that the new scores shall have",
            )
        if weights:
            return weights[0] or None
    return step.weight or None


def rescore(
    store: ExperienceStore,
    plan: OperatorPlan,
    selection: Selection,
    *,
    weight: float | None,
    version: int | None = None,
    chunk_rows: int = 1024,
    write: bool = True,
    advance: Callable[[int], None] = lambda rows: None,
) -> Rescored:
    """Run the operators over the pending rows, part by part.

    Args:
        plan: of `compile_scoring`.
        weight: of the component; None makes it a metric.
        version: of the new scores; None: the next of each row.
        chunk_rows: rows in one part, which is kept whole or lost whole.
        write: False: only say what the scores would be.
        advance: told the rows done.

    Raises:
        UsageError: somebody gave a row this `version` in the meantime; names it. Parts before it stay.
        OperatorError: an operator breaks its contract, or a row fails under `on_error: raise`.
    """
    author, component = author_of(plan), plan.steps[-1].id
    tasks = store.table("tasks")
    current = _newest_weights(store)
    after: list[pl.DataFrame] = [pl.DataFrame(schema={"experience_id": pl.String, "value": pl.Float64})]
    errors: list[tuple[str, str]] = []
    at: int | None = None
    for part in parts(selection, plan, chunk_rows):
        result = _run(store, plan, part, tasks, model_version=current)
        pending = part.filter("pending")
        fresh = result.scores.filter(pc.is_in(result.scores.column("experience_id"), value_set=ids_of(pending)))
        failed = result.decisions.filter(pc.equal(result.decisions.column("reason"), "error"))
        errors += [(row["experience_id"], row["detail"]) for row in failed.to_pylist()]
        if write and fresh.num_rows:
            at = _append(store, fresh, part, component=component, author=author, weight=weight, version=version)
        named = polars_frame(fresh.select(["experience_id", "name", "value"])).filter(pl.col("name") == component)
        after.append(named.select("experience_id", "value"))
        advance(pending.height)
    values = pl.concat(after)
    return Rescored(values.height, selection.pending - values.height - len(errors), errors, values, at)


def _run(
    store: ExperienceStore, plan: OperatorPlan, part: pl.DataFrame, tasks: pa.Table, *, model_version: int
) -> CurationResult:
    ids = part["experience_id"].to_list()
    rollouts = store.fetch(ids)
    scores = store.narrow("scores", ids)
    wanted = pc.unique(rollouts.column("task_id"))
    frame = build_frame(
        rollouts,
        tasks.filter(pc.is_in(tasks.column("task_id"), value_set=wanted)),
        scores,
        columns=set(plan.frame_columns) | {"error"},
        info_columns=plan.info_columns,
    )
    return run_operators(
        plan, frame, seed=0, step=0, model_version=model_version, pass_id="score", run_id="score", scores=scores
    )


def _newest_weights(store: ExperienceStore) -> int:
    versions = store.table("models", columns=["version"]).column("version")
    return pc.max(versions).as_py() or 0


def _append(
    store: ExperienceStore,
    fresh: pa.Table,
    part: pl.DataFrame,
    *,
    component: str,
    author: str,
    weight: float | None,
    version: int | None,
) -> int:
    """Write one part; versions are counted anew when somebody else scored a row in the meantime."""
    moment = datetime.now(UTC)
    for _ in range(_ATTEMPTS):
        rows = _versioned(store, fresh, part, version=version).with_columns(
            weight=pl.when(pl.col("name") == component).then(pl.lit(weight, pl.Float64)),
            source=pl.lit("operator"),
            author=pl.lit(author),
            scored_at=pl.lit(moment),
        )
        table = rows.select(SCORES.schema.names).to_arrow(compat_level=pl.CompatLevel.oldest()).cast(SCORES.schema)
        try:
            return store.append("scores", table).version
        except KeyConflictError as error:
            if version is not None:
                raise UsageError(
                    f"{component}@v{version} was given to a row of this part by somebody else in the meantime: {error}"
                ) from error
    raise StoreBusyError(f"{store.path}: others scored some of these rows {_ATTEMPTS} times in between; try again")


def _versioned(store: ExperienceStore, fresh: pa.Table, part: pl.DataFrame, *, version: int | None) -> pl.DataFrame:
    """New scores with the run of their row and their version."""
    rows = polars_frame(fresh).drop("version", "run_id").join(
        part.select("experience_id", "run_id"), on="experience_id", how="left", maintain_order="left"
    )  # fmt: skip
    if version is not None:
        return rows.with_columns(version=pl.lit(version, pl.Int32))
    key = ["experience_id", "name"]
    stored = polars_frame(store.narrow("scores", part["experience_id"].to_list()))
    newest = stored.group_by(key).agg(newest=pl.col("version").max())
    return (
        rows.join(newest, on=key, how="left", maintain_order="left")
        .with_columns(version=(pl.col("newest").fill_null(0) + 1).cast(pl.Int32))
        .drop("newest")
    )
