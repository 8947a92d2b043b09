"""A pipeline over chosen rows of a store, as if they were new; what `curate` would do, and nothing written.

Scores that earlier passes of operators wrote are left out, because they would not be there either; what workflows,
judges, people and `buffer-engine score` gave stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.identity import stable_seed
from buffer_engine.schema import ROLLOUTS, SCORES
from buffer_engine.store.base import ExperienceStore
from operators.engine import run_operators
from operators.frame import build_frame
from operators.plan import PlannedOperator
from operators.reward_state import current_reward
from pipelines.curate import polars_frame
from pipelines.plan import Plan
from pipelines.rehearsal.choosing import ChosenRows
from pipelines.rehearsal.examples import Change, Examples

COUNTERS = ("rows_in", "kept", "rejected", "held", "masked", "added", "scored", "nulls", "errors")


@dataclass(slots=True)
class OperatorNumbers:
    """What one operator did in all passes, in rows.

    Attributes:
        changed: living rows of which it replaced a column that was there before.
        scored, nulls: values of all its components, and those that could not be scored.
        mean: of its component, over the rows it scored; None: it scored none.
        errors: rows on which it failed (they are among `rejected` or `held`).
    """

    operator: str
    type: str
    rows_in: int = 0
    kept: int = 0
    rejected: int = 0
    held: int = 0
    masked: int = 0
    added: int = 0
    changed: int = 0
    scored: int = 0
    nulls: int = 0
    errors: int = 0
    mean: float | None = None


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What a pipeline would do.

    Attributes:
        name: of the specification.
        operators: the intake and the operators, in order.
        rows: one line per row: experience_id, run_id, group_id, task_id, error, tokens (sampled tokens that may train),
            total_tokens, reward_before (as stored now), reward_after, verdict (keep | reject | hold), operator, reason,
            detail, masked. A reward is null where there is none.
        examples: rows by operator, verdict and reason, and changed columns.
        changed: (operator, column) → rows.
    """

    name: str
    operators: Sequence[OperatorNumbers]
    rows: pl.DataFrame
    examples: Examples
    changed: dict[tuple[str, str], int]


@dataclass(slots=True)
class _Watcher:
    """Counts what operators replace, and keeps the first few of each column."""

    most: int
    rows: dict[str, int] = field(default_factory=dict[str, int])
    columns: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    changes: list[Change] = field(default_factory=list[Change])

    def see(self, planned: PlannedOperator, before: pl.DataFrame, after: pl.DataFrame) -> None:
        any_changed = pl.Series([False] * before.height, dtype=pl.Boolean)
        for name in planned.contract.writes:
            if name not in before.columns:
                continue
            changed = before["alive"] & after[name].ne_missing(before[name])
            any_changed = any_changed | changed
            key = (planned.id, name)
            seen = self.columns.get(key, 0)
            self.columns[key] = seen + int(changed.sum())
            for at in changed.arg_true().head(max(self.most - seen, 0)):
                self.changes.append(
                    Change(before["experience_id"][at], planned.id, name, before[name][at], after[name][at])
                )
        self.rows[planned.id] = self.rows.get(planned.id, 0) + int(any_changed.sum())


def rehearse(
    store: ExperienceStore,
    plan: Plan,
    chosen: ChosenRows,
    *,
    examples: int = 3,
    advance: Callable[[int], None] = lambda rows: None,
) -> Rehearsal:
    """Run the operators of a plan over chosen rows and keep what they found in memory.

    Every operator is told the newest weight version and step of the rows' run, as if all rows were curated now.

    Args:
        examples: rows to keep per operator and reason.
        advance: told the number of rows done.

    Raises:
        OperatorError: an operator breaks its contract, or a row fails under `on_error: raise`.
    """
    steps = plan.operators.steps
    numbers = {"intake": OperatorNumbers("intake", "intake")}
    numbers |= {step.id: OperatorNumbers(step.id, step.type) for step in steps}
    watcher = _Watcher(examples)
    moment = _moments(store)
    of_operators = _curating_operators(store)
    lines: list[pl.DataFrame] = []
    decided: list[pl.DataFrame] = []
    written: list[pa.Table] = []
    past = _Past(store, plan)
    for number, (run_id, ids) in enumerate(chosen.passes):
        past.enter(run_id)
        stored = store.narrow("scores", ids)
        known = stored.filter(pc.invert(_by_operators(stored, of_operators)))
        rollouts = store.fetch(ids)
        frame = build_frame(
            rollouts,
            past.tasks(rollouts),
            known,
            columns=set(plan.operators.frame_columns) | {"error"},
            info_columns=plan.task_columns,
        )
        step, version = moment.get(run_id, (0, 0))
        pass_id = f"{run_id}/{number}"
        result = run_operators(
            plan.operators,
            frame,
            seed=stable_seed(plan.spec.seed, "curate", pass_id),
            step=step,
            model_version=version,
            pass_id=pass_id,
            run_id=run_id,
            scores=known,
            history=past.history,
            watch=watcher.see,
        )
        for row in result.runs.to_pylist():
            into = numbers[row["operator"]]
            for counter in COUNTERS:
                setattr(into, counter, getattr(into, counter) + row[counter])
        after = pa.concat_tables([known, result.scores])
        lines.append(_lines(rollouts, stored, after, result.decisions))
        decided.append(polars_frame(result.decisions.filter(pc.not_equal(result.decisions.column("verdict"), "keep"))))
        written.append(result.scores.select(["name", "value"]))
        past.keep(result.survivors["experience_id"].to_list(), after)
        advance(len(ids))
    for operator, changed in watcher.rows.items():
        numbers[operator].changed = changed
    means = _means(written)
    for operator, into in numbers.items():
        into.mean = means.get(operator)
    return Rehearsal(
        plan.spec.name,
        list(numbers.values()),
        pl.concat(lines),
        Examples.of(store, pl.concat(decided), watcher.changes, most=examples),
        {key: count for key, count in watcher.columns.items() if count},
    )


class _Past:
    """What a pass may know of earlier passes of its run: the rows that they kept, with their scores."""

    def __init__(self, store: ExperienceStore, plan: Plan) -> None:
        self._store = store
        self._info_columns = plan.task_columns
        self._tasks = store.table("tasks")
        self._run = ""
        self._ids: list[str] = []
        self._scores: list[pa.Table] = []

    def enter(self, run_id: str) -> None:
        """Forget the past of another run."""
        if run_id != self._run:
            self._run, self._ids, self._scores = run_id, [], []

    def keep(self, ids: Sequence[str], scores: pa.Table) -> None:
        """Rows of the pass that ended, and the scores they have now."""
        self._ids += ids
        self._scores.append(scores)

    def tasks(self, rollouts: pa.Table) -> pa.Table:
        """The tasks of rows."""
        wanted = pc.unique(rollouts.column("task_id"))
        return self._tasks.filter(pc.is_in(self._tasks.column("task_id"), value_set=wanted))

    def history(self, columns: Sequence[str]) -> pl.DataFrame:
        """Kept rows with the columns asked for."""
        rollouts = self._store.fetch(self._ids) if self._ids else ROLLOUTS.schema.empty_table()
        return build_frame(
            rollouts,
            self.tasks(rollouts),
            pa.concat_tables(self._scores) if self._scores else SCORES.schema.empty_table(),
            columns={"experience_id", *columns},
            info_columns=self._info_columns,
        )


def _moments(store: ExperienceStore) -> dict[str, tuple[int, int]]:
    """(step, weight version) of each run's newest weights."""
    models = polars_frame(store.table("models", columns=["run_id", "step", "version"]))
    newest = models.group_by("run_id").agg(pl.col("step", "version").sort_by("version").last())
    return {run: (step, version) for run, step, version in newest.iter_rows()}


def _curating_operators(store: ExperienceStore) -> pa.Array:
    return pc.unique(store.table("operator_runs", columns=["operator"]).column("operator"))


def _by_operators(scores: pa.Table, operators: pa.Array) -> pa.ChunkedArray:
    """Score rows that operators of curation passes wrote."""
    return pc.and_(
        pc.equal(scores.column("source"), "operator"), pc.is_in(scores.column("author"), value_set=operators)
    )


def _lines(rollouts: pa.Table, stored: pa.Table, after: pa.Table, decisions: pa.Table) -> pl.DataFrame:
    columns = ["experience_id", "run_id", "group_id", "task_id", "error", "loss_mask", "token_ids"]
    judged = polars_frame(decisions.select(["experience_id", "verdict", "operator", "reason", "detail"]))
    masked = judged.filter(pl.col("verdict") == "mask")["experience_id"].unique()
    before = current_reward(stored).select("experience_id", reward_before="reward")
    then = current_reward(after).select("experience_id", reward_after="reward")
    return (
        polars_frame(rollouts.select(columns))
        .select(
            *columns[:5],
            tokens=pl.col("loss_mask").list.sum().cast(pl.Int64),
            total_tokens=pl.col("token_ids").list.len().cast(pl.Int64),
        )
        .join(before, on="experience_id", how="left", maintain_order="left")
        .join(then, on="experience_id", how="left", maintain_order="left")
        .join(judged.filter(pl.col("verdict") != "mask"), on="experience_id", how="left", maintain_order="left")
        .with_columns(
            masked=pl.col("experience_id").is_in(masked.to_list()),
            **{
                name: pl.when(pl.col("error").is_null()).then(pl.col(name))
                for name in ("reward_before", "reward_after")
            },
        )
    )


def _means(written: Sequence[pa.Table]) -> dict[str, float]:
    """Mean of each component over the rows that were given a value."""
    if not written:
        return {}
    values = polars_frame(pa.concat_tables(written)).drop_nulls("value")
    return dict(values.group_by("name").agg(pl.col("value").mean()).iter_rows())
