"""Curation passes: new rollouts through the operators, and what they found back into the store.

One pass takes whole groups in order of arrival and is one transaction: scores, decisions, operator runs, new rows and
the pass cursor become visible together or not at all. A pass that is interrupted leaves nothing and is repeated.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.identity import stable_seed
from buffer_engine.schema import ROLLOUTS
from buffer_engine.store.base import ExperienceStore
from buffer_engine.store.damage import past_damage
from explorers.base import Engine
from operators.engine import CurationResult, run_operators
from operators.frame import build_frame, current_reward
from operators.plan import OperatorPlan
from pipelines.added_rows import added_rollouts, carried_scores
from pipelines.cursors import RunCursors
from pipelines.metrics import metric_rows

PASS_ROWS = 4096
"""Most rows in one pass; bounds its memory. A single larger group is still taken whole."""


@dataclass(frozen=True, slots=True)
class PassSummary:
    """What one pass did, in rows.

    Attributes:
        numbers: metrics of its rows by the step that explored them, as stored with the pass.
    """

    pass_id: str
    rows: int
    kept: int
    rejected: int
    held: int
    added: int
    numbers: Mapping[int, Mapping[str, float]]


def pass_numbers(
    rollouts: pa.Table, scores: pa.Table, decisions: pa.Table, *, step: int, seconds: float
) -> dict[int, dict[str, float]]:
    """Metrics of a pass: explored rows, their rewards and their fates, by the step that explored them.

    Args:
        step: stands in for rows that no step explored (imports).
        seconds: of the whole pass; shared among the steps by their rows.
    """
    final = polars_frame(decisions.select(["experience_id", "verdict"])).filter(pl.col("verdict") != "mask")
    frame = (
        polars_frame(rollouts.select(["experience_id", "explore_step", "eos_sampled", "error", "made_by", "loss_mask"]))
        .with_columns(pl.col("explore_step").fill_null(step), tokens=pl.col("loss_mask").list.sum())
        .join(final, on="experience_id", how="left")
        .join(current_reward(scores).select("experience_id", "reward"), on="experience_id", how="left")
    )
    numbers: dict[int, dict[str, float]] = {}
    for (of_step,), rows in frame.group_by("explore_step", maintain_order=True):
        fine = rows.filter(pl.col("error").is_null())
        found = {
            "curate/rows": float(rows.height),
            "curate/kept": float((rows["verdict"] == "keep").sum()),
            "curate/rejected": float((rows["verdict"] == "reject").sum()),
            "curate/held": float((rows["verdict"] == "hold").sum()),
            "curate/seconds": seconds * rows.height / frame.height,
        }
        if (rows["made_by"] == "explorer").any():
            found["explore/rows"] = float(rows.height)
            found["explore/errors"] = float(rows.height - fine.height)
            if fine.height:
                found["explore/ended"] = float(fine["eos_sampled"].cast(pl.Float64).to_numpy().mean())
                found["explore/response_tokens"] = float(fine["tokens"].to_numpy().mean())
        rewards = fine["reward"].drop_nulls().to_numpy()
        if len(rewards):
            found["explore/reward_mean"] = float(rewards.mean())
            found["explore/reward_std"] = float(rewards.std())
        numbers[int(of_step)] = found  # type: ignore[call-overload]
    return numbers


def reject_counts(store: ExperienceStore, ids: Sequence[str]) -> list[tuple[str, str, int]]:
    """(operator, reason, rows) of what was rejected or held among these rows, most first."""
    decisions = store.narrow("decisions", ids)
    chosen = decisions.filter(pc.is_in(decisions.column("verdict"), value_set=pa.array(["reject", "hold"])))
    counts = Counter(zip(chosen.column("operator").to_pylist(), chosen.column("reason").to_pylist(), strict=True))
    return [(operator, reason, count) for (operator, reason), count in counts.most_common()]


def polars_frame(table: pa.Table) -> pl.DataFrame:
    """An Arrow table as a Polars frame, zero copy where the types allow it."""
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def scoring_steps(plan: OperatorPlan) -> OperatorPlan:
    """The operators of a plan that only score or derive columns, for rows that no filter may judge."""
    steps = tuple(
        step
        for step in plan.steps
        if not (step.contract.drops or step.contract.holds or step.contract.masks or step.contract.adds)
    )
    return replace(plan, steps=steps)


class Curator:
    """Runs the compiled operators of one run over rollouts that have no verdict yet."""

    def __init__(
        self,
        store: ExperienceStore,
        plan: OperatorPlan,
        *,
        run_id: str,
        seed: int,
        info_columns: Mapping[str, pl.DataType],
        engine: Engine | None = None,
    ) -> None:
        self._store = store
        self._plan = plan
        self._run_id = run_id
        self._seed = seed
        self._info_columns = info_columns
        self._engine = engine
        self._cursors = RunCursors(run_id)
        self._tasks: dict[str, dict[str, Any]] = {}

    def curate_new(self, *, step: int, model_version: int) -> list[PassSummary]:
        """Pass all new training rows of the run through the operators, until none is new."""
        done: list[PassSummary] = []
        while True:
            ids = past_damage(self._next_rows)
            if not ids:
                return done
            number = self._store.cursor(self._cursors.passes)
            done.append(self._one_pass(ids, number, step=step, model_version=model_version))

    def score_rows(self, rollouts: pa.Table, *, step: int, model_version: int, pass_id: str) -> CurationResult:
        """Run only the operators that score or derive columns; nothing is written. For evaluation rows."""
        return self._run(scoring_steps(self._plan), rollouts, step=step, model_version=model_version, pass_id=pass_id)

    def close(self) -> None:
        """Free what operators set up (worker processes)."""
        self._plan.close()

    def _next_rows(self) -> list[str]:
        """Ids of new rows in arrival order, cut at a group boundary once `PASS_ROWS` are reached."""
        state = self._store.rollout_state(run_id=self._run_id, status="new")
        ids: list[str] = state.column("experience_id").to_pylist()
        if not ids:
            return []
        facts = self._store.fetch(ids, columns=["experience_id", "group_id", "partition"])
        facts = facts.filter(pc.equal(facts.column("partition"), "train"))
        chosen: list[str] = []
        groups: set[str] = set()
        for row_id, group in zip(
            facts.column("experience_id").to_pylist(), facts.column("group_id").to_pylist(), strict=True
        ):
            if len(chosen) >= PASS_ROWS and group not in groups:
                break
            groups.add(group)
            chosen.append(row_id)
        return chosen

    def _one_pass(self, ids: Sequence[str], number: int, *, step: int, model_version: int) -> PassSummary:
        started = time.perf_counter()
        pass_id = f"{self._run_id}/{number}"
        rollouts = self._store.fetch(ids)
        result = self._run(self._plan, rollouts, step=step, model_version=model_version, pass_id=pass_id)
        added = result.added.height
        scores = pa.concat_tables([self._store.narrow("scores", ids), result.scores])
        numbers = pass_numbers(rollouts, scores, result.decisions, step=step, seconds=time.perf_counter() - started)
        tables = {
            "scores": result.scores,
            "decisions": result.decisions,
            "operator_runs": result.runs,
            "metrics": metric_rows(self._run_id, numbers),
        }
        if added:
            tables["rollouts"] = added_rollouts(
                rollouts, result.added, run_id=self._run_id, number=number, engine=self._engine
            )
            carried = carried_scores(
                result.added, tables["rollouts"], scores, components=self._plan.components, run_id=self._run_id
            )
            tables["scores"] = pa.concat_tables([result.scores, carried])
        self._store.append_all(
            {name: table for name, table in tables.items() if table.num_rows},
            cursors={self._cursors.passes: number + 1},
        )
        verdicts = result.decisions.column("verdict").to_pylist()
        return PassSummary(
            pass_id,
            rollouts.num_rows,
            verdicts.count("keep"),
            verdicts.count("reject"),
            verdicts.count("hold"),
            added,
            numbers,
        )

    def _run(
        self, plan: OperatorPlan, rollouts: pa.Table, *, step: int, model_version: int, pass_id: str
    ) -> CurationResult:
        ids = rollouts.column("experience_id").to_pylist()
        scores = self._store.narrow("scores", ids)
        frame = build_frame(
            rollouts,
            self._task_rows(rollouts),
            scores,
            columns=set(plan.frame_columns) | {"error"},
            info_columns=self._info_columns,
        )
        return run_operators(
            plan,
            frame,
            seed=stable_seed(self._seed, "curate", pass_id),
            step=step,
            model_version=model_version,
            pass_id=pass_id,
            run_id=self._run_id,
            scores=scores,
            history=self._history,
        )

    def _task_rows(self, rollouts: pa.Table) -> pa.Table:
        return self._store.narrow("tasks", pc.unique(rollouts.column("task_id")).to_pylist())

    def _history(self, columns: Sequence[str]) -> pl.DataFrame:
        """Kept rows of earlier passes of this run, with the columns asked for."""
        return past_damage(lambda: self._kept_rows(columns))

    def _kept_rows(self, columns: Sequence[str]) -> pl.DataFrame:
        state = self._store.rollout_state(run_id=self._run_id, status="kept")
        ids: list[str] = state.column("experience_id").to_pylist()
        rollouts = self._store.fetch(ids) if ids else ROLLOUTS.schema.empty_table()
        rollouts = rollouts.filter(pc.equal(rollouts.column("partition"), "train"))
        return build_frame(
            rollouts,
            self._task_rows(rollouts),
            self._store.narrow("scores", ids),
            columns={"experience_id", *columns},
            info_columns=self._info_columns,
        )
