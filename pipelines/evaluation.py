"""Evaluation: held-out tasks played and scored, kept in the store as rows of their own partition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.identity import group_id
from buffer_engine.schema import DECISIONS
from buffer_engine.store.base import ExperienceStore
from buffer_engine.store.damage import past_damage
from explorers.base import Chunk, Explorer, GroupPlan, Task
from operators.reward_state import current_reward, current_scores, read_scores
from pipelines.clock import now
from pipelines.curate import Curator
from pipelines.cursors import RunCursors
from pipelines.exploration import explore_groups
from pipelines.metrics import metric_rows

SOLVED = 1.0 - 1e-9
"""A component at or above this is solved; verifiers give exactly 1 for a right answer."""


def evaluate(
    store: ExperienceStore,
    explorer: Explorer,
    curator: Curator,
    tasks: Sequence[Task],
    *,
    run_id: str,
    name: str,
    step: int,
    model_version: int,
    samples_per_task: int,
    solved: str | None,
    on_chunk: Callable[[Chunk], None],
) -> dict[str, float]:
    """Play every task, score the rows with the pipeline's score operators, and return metrics `eval/<name>/…`.

    Args:
        solved: component that says whether a row is right; None: the reward.

    Returns:
        `solve_rate` (share of rows without error whose component is 1), the mean of every component,
        `right_when_parsable` when a component `parsable` exists, `reward`, `rows`, `errors`.
    """
    cursors = RunCursors(run_id)
    groups = [GroupPlan(task, group_id(run_id, f"eval/{task.task_id}", step), samples_per_task) for task in tasks]
    explore_groups(
        store,
        explorer,
        groups,
        run_id=run_id,
        step=step,
        partition="eval",
        chunk_cursor=cursors.evaluation_chunks(step),
        done_cursors={},
        on_chunk=on_chunk,
        record=False,
    )
    ids = past_damage(lambda: _rows_of(store, run_id, {group.group_id for group in groups}))
    rollouts = store.fetch(ids)
    pass_id = f"{run_id}/evaluation/{step}"
    result = curator.score_rows(rollouts, step=step, model_version=model_version, pass_id=pass_id)
    scores = pa.concat_tables([store.narrow("scores", ids), result.scores])
    numbers = evaluation_numbers(rollouts, scores, name=name, solved=solved)
    tables = {
        "scores": result.scores,
        "decisions": _verdicts(rollouts, run_id, pass_id),
        "metrics": metric_rows(run_id, {step: numbers}),
    }
    store.append_all(
        {table: rows for table, rows in tables.items() if rows.num_rows}, cursors={cursors.evaluated(step): 1}
    )
    return numbers


def _rows_of(store: ExperienceStore, run_id: str, groups: set[str]) -> list[str]:
    state = store.rollout_state(run_id=run_id, status="new")
    ids: list[str] = state.column("experience_id").to_pylist()
    facts = store.fetch(ids, columns=["experience_id", "group_id"])
    mine = facts.filter(pc.is_in(facts.column("group_id"), value_set=pa.array(sorted(groups))))
    return mine.column("experience_id").to_pylist()


def _verdicts(rollouts: pa.Table, run_id: str, pass_id: str) -> pa.Table:
    """Evaluation rows are kept as they are; failed ones are rejected, so that every row has its one verdict."""
    errors: list[str | None] = rollouts.column("error").to_pylist()
    count = len(errors)
    return pa.table(
        {
            "experience_id": rollouts.column("experience_id").to_pylist(),
            "verdict": ["keep" if error is None else "reject" for error in errors],
            "operator": ["pipeline" if error is None else "intake" for error in errors],
            "position": pa.nulls(count, pa.int32()),
            "reason": ["evaluation" if error is None else "error:" + error.partition(":")[0] for error in errors],
            "detail": errors,
            "ref_id": pa.nulls(count, pa.string()),
            "pass_id": [pass_id] * count,
            "run_id": [run_id] * count,
            "decided_at": [now()] * count,
        },
        schema=DECISIONS.schema,
    )


def evaluation_numbers(rollouts: pa.Table, scores: pa.Table, *, name: str, solved: str | None) -> dict[str, float]:
    """Metrics of evaluation rows; see `evaluate`. `solved: None` takes the reward."""
    fine = rollouts.filter(pc.is_null(rollouts.column("error")))
    head = f"eval/{name}"
    metrics = {f"{head}/rows": float(rollouts.num_rows), f"{head}/errors": float(rollouts.num_rows - fine.num_rows)}
    ids = fine.column("experience_id").to_pylist()
    if not ids:
        return metrics
    rows = pl.DataFrame({"experience_id": ids}).join(current_reward(scores), on="experience_id", how="left")
    newest = current_scores(read_scores(scores))
    wide = rows.select("experience_id", "reward")
    for component in sorted(newest["name"].unique().to_list()):
        values = newest.filter(pl.col("name") == component).select("experience_id", pl.col("value").alias(component))
        wide = wide.join(values, on="experience_id", how="left")
        metrics[f"{head}/{component}"] = _mean(wide[component])
    if solved is not None and solved not in wide.columns:
        # The operator scored no evaluation row (its condition matched none): nothing is solved.
        wide = wide.with_columns(pl.lit(None, dtype=pl.Float64).alias(solved))
    metrics[f"{head}/reward"] = _mean(wide["reward"])
    judge = wide["reward" if solved is None else solved]
    # A row that could not be scored is not solved: it stays in the denominator.
    right = (judge >= SOLVED).fill_null(False)
    metrics[f"{head}/solve_rate"] = float(right.cast(pl.Float64).mean() or 0.0)  # type: ignore[arg-type]
    if "parsable" in wide.columns:
        parsable = (wide["parsable"] >= SOLVED).fill_null(False)
        if parsable.any():
            metrics[f"{head}/right_when_parsable"] = _mean(right.filter(parsable).cast(pl.Float64))
    metrics[f"{head}/response_tokens"] = _sampled_tokens(fine)
    return metrics


def _mean(series: pl.Series) -> float:
    value = series.mean()
    return float("nan") if value is None else float(value)  # type: ignore[arg-type]


def _sampled_tokens(rollouts: pa.Table) -> float:
    flat = pc.list_flatten(rollouts.column("loss_mask"))
    return float(pc.sum(pc.cast(flat, pa.int64())).as_py() or 0) / rollouts.num_rows
