"""One curation pass: every row goes in, and comes out through exactly one door with a reason.

The engine owns what operators must not care about: failed rollouts, `where`, error policies, score versions, the reward
between operators, and the balance of rows. It touches no store; what it returns is rows for the store's tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import polars as pl
import pyarrow as pa

from buffer_engine.errors import ConservationError, OperatorError
from buffer_engine.identity import stable_digest, stable_seed
from buffer_engine.schema import DECISIONS, OPERATOR_RUNS, SCORES
from operators.base import Context, Result
from operators.frame import ALWAYS
from operators.guard import apply_guarded, describe, moved_spans
from operators.ledger import Ledger
from operators.plan import OperatorPlan, PlannedOperator

History = Callable[[Sequence[str]], pl.DataFrame]

Watch = Callable[[PlannedOperator, pl.DataFrame, pl.DataFrame], None]
"""Told after each operator: the rows before it and after it, in the same order, with `alive`; for dry runs."""

_ADDED_SCHEMA: dict[str, pl.DataType] = {"parent_id": pl.String(), "made_by": pl.String()}
_DECISION_SCHEMA: dict[str, pl.DataType] = {
    "experience_id": pl.String(),
    "verdict": pl.String(),
    "operator": pl.String(),
    "position": pl.Int32(),
    "reason": pl.String(),
    "detail": pl.String(),
    "ref_id": pl.String(),
}


@dataclass(frozen=True, slots=True)
class CurationResult:
    """What a pass found, as rows for the store.

    Attributes:
        scores: rows of `schema.SCORES`.
        decisions: rows of `schema.DECISIONS`: one keep, reject or hold per row that went in, and any masks beside it.
        runs: rows of `schema.OPERATOR_RUNS`: the intake (position -1), then one per operator.
        added: rows to create: parent_id, made_by (operator id), messages, and what operators gave of `ADDED_SCHEMA`,
            where spans name rows by experience_id. They enter a later pass, not this one.
        survivors: the frame of the kept rows, with derived columns, components and reward as they are at the end.
    """

    scores: pa.Table
    decisions: pa.Table
    runs: pa.Table
    added: pl.DataFrame
    survivors: pl.DataFrame


def run_operators(
    plan: OperatorPlan,
    frame: pl.DataFrame,
    *,
    seed: int,
    step: int,
    model_version: int,
    pass_id: str,
    run_id: str,
    scores: pa.Table | pl.DataFrame | None = None,
    history: History | None = None,
    now: datetime | None = None,
    watch: Watch | None = None,
) -> CurationResult:
    """Run a plan over a frame.

    Args:
        frame: one row per rollout with `plan.frame_columns` (`operators.frame.build_frame`); whole groups.
        seed: of the pipeline; each operator gets one derived from it and its id.
        step, model_version: what operators learn about the moment.
        scores: rows of `schema.SCORES` that these rollouts already have; new rows get the next version.
        history: columns of the rows that earlier passes of the run kept, for operators that compare with the past.
        now: time written into the rows; default: the clock.
        watch: called after each operator.
    Raises:
        OperatorError: an operator breaks its contract, or a row fails under `on_error: raise`.
        ConservationError: rows were lost, doubled or invented.
    """
    _check_frame(plan, frame)
    state = _Pass(
        plan,
        Context(seed=seed, model_version=model_version, step=step)
        if history is None
        else Context(seed=seed, model_version=model_version, step=step, history=history),
        Ledger.open(scores, hidden=plan.components),
    )
    state.take_in(frame)
    for planned in plan.steps:
        before = state.rows
        state.run(planned)
        if watch is not None:
            watch(planned, before, state.rows)
    state.finish(frame)
    return state.result(run_id=run_id, pass_id=pass_id, now=now or datetime.now(UTC))


def _check_frame(plan: OperatorPlan, frame: pl.DataFrame) -> None:
    missing = [name for name in (*plan.frame_columns, *ALWAYS, "error") if name not in frame.columns]
    if missing:
        raise OperatorError(f"the frame lacks {', '.join(dict.fromkeys(missing))}: build it with plan.frame_columns")
    doubled = frame.filter(pl.col("experience_id").is_duplicated())
    if doubled.height:
        raise ConservationError(f"the frame has experience {doubled['experience_id'][0]!r} more than once")


@dataclass(slots=True)
class _Counts:
    rows_in: int
    kept: int = 0
    rejected: int = 0
    held: int = 0
    masked: int = 0
    added: int = 0
    scored: int = 0
    nulls: int = 0
    errors: int = 0
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0


@dataclass(slots=True)
class _Pass:
    """The state of one pass. `rows` holds all that passed the intake, `alive` tells who is still in."""

    plan: OperatorPlan
    context: Context
    ledger: Ledger
    rows: pl.DataFrame = field(default_factory=pl.DataFrame)
    scores: list[pl.DataFrame] = field(default_factory=list)
    decisions: list[pl.DataFrame] = field(default_factory=list)
    added: list[pl.DataFrame] = field(default_factory=list)
    runs: list[tuple[int, str, str, str, _Counts]] = field(default_factory=list)

    def take_in(self, frame: pl.DataFrame) -> None:
        """Reject failed rollouts before any operator sees them."""
        failed = frame.filter(pl.col("error").is_not_null())
        kind = pl.col("error").str.split(":").list.first().str.strip_chars()
        self._decide(
            failed.select(
                "experience_id", verdict=pl.lit("reject"), reason=pl.lit("error:") + kind, detail=pl.col("error")
            ),
            "intake",
            None,
        )
        self.rows = frame.filter(pl.col("error").is_null()).with_columns(alive=pl.lit(True))
        if "reward" in frame.columns:
            self.rows = self.rows.with_columns(reward=self.ledger.rewards(self.rows["experience_id"]))
        counts = _Counts(frame.height, kept=self.rows.height, rejected=failed.height)
        self.runs.append((-1, "intake", "intake", stable_digest("intake", 1), counts))

    def run(self, planned: PlannedOperator) -> None:
        """Run one operator and let its verdicts, scores and columns take effect."""
        wall, cpu = time.perf_counter(), time.process_time()
        before = int(self.rows["alive"].sum())
        counts = _Counts(before)
        positions, failures = self._members(planned)
        alive = ("alive",) if planned.contract.over == "all" else ()
        view = self.rows.select(list(dict.fromkeys((*ALWAYS, *sorted(planned.contract.reads), *alive))))[positions]
        result = apply_guarded(planned.operator, planned.contract, view, self._context_of(planned), name=planned.id)
        errors = [*failures, *((int(positions[error.row]), error.message) for error in result.errors)]
        self._take_columns(planned, positions, result)
        self._take_scores(planned, positions, result, {row for row, _ in errors}, counts)
        self._take_added(planned, positions, result, counts)
        self._take_verdicts(planned, positions, result, errors, counts)
        counts.kept = int(self.rows["alive"].sum())
        if counts.kept + counts.rejected + counts.held != before:
            raise ConservationError(
                f"operator {planned.id!r}: {before} rows went in, but {counts.kept} kept + {counts.rejected} rejected "
                f"+ {counts.held} held = {counts.kept + counts.rejected + counts.held}"
            )
        counts.wall_seconds, counts.cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        self.runs.append((planned.position, planned.id, planned.type, planned.fingerprint, counts))

    def finish(self, frame: pl.DataFrame) -> None:
        """Keep the survivors and check that every row left through exactly one door."""
        kept = self.rows.filter("alive").select("experience_id", verdict=pl.lit("keep"), reason=pl.lit("kept"))
        self._decide(kept, "pipeline", None)
        final = pl.concat(self.decisions).filter(pl.col("verdict") != "mask")["experience_id"]
        if final.is_duplicated().any() or set(final) != set(frame["experience_id"]):
            raise ConservationError(f"{frame.height} rows went in, {len(final)} final verdicts came out")

    def _context_of(self, planned: PlannedOperator) -> Context:
        own_seed = stable_seed(self.context.seed, planned.id)
        return Context(own_seed, self.context.model_version, self.context.step, self.context.history)

    def _members(self, planned: PlannedOperator) -> tuple[pl.Series, list[tuple[int, str]]]:
        """Rows (positions in `rows`) that the operator is shown, and living rows on which its `where` fails."""
        shown = self.rows.with_row_index("position__")
        if planned.contract.over == "survivors":
            shown = shown.filter("alive")
        failures: list[tuple[int, str]] = []
        if planned.where is not None:
            matches, problems = _condition(planned.where, shown)
            failures = [(shown["position__"][row], text) for row, text in problems if shown["alive"][row]]
            shown = shown.filter(matches)
        return shown["position__"], failures

    def _take_columns(self, planned: PlannedOperator, positions: pl.Series, result: Result) -> None:
        living = self.rows["alive"].gather(positions)
        for name, dtype in planned.contract.writes.items():
            old = self.rows[name] if name in self.rows.columns else pl.Series(name, [None] * self.rows.height, dtype)
            new = result.columns[name].filter(living)
            self.rows = self.rows.with_columns(_replaced(old, positions.filter(living), new).alias(name))

    def _take_scores(
        self, planned: PlannedOperator, positions: pl.Series, result: Result, failed: set[int], counts: _Counts
    ) -> None:
        if not planned.contract.scores:
            return
        counted = self.rows["alive"].gather(positions) & ~positions.is_in(list(failed))
        if result.scored is not None:
            counted = counted & result.scored
        ids = self.rows["experience_id"].gather(positions.filter(counted))
        comments = pl.Series("comment", [result.comments.get(row) for row in range(len(positions))], pl.String)
        for name in planned.contract.scores:
            values = result.scores[name].filter(counted)
            before = self.ledger.written.height
            # Only the component with the operator's own name has a share in the reward; those beside it are metrics.
            weight = planned.weight if name == planned.id else None
            self.ledger = self.ledger.score(name, ids, values, weight or 0.0)
            rows = self.ledger.written[before:].with_columns(comment=comments.filter(counted))
            self.scores.append(rows.with_columns(author=pl.lit(planned.id)))
            self.rows = self.rows.with_columns(self.ledger.values(name, self.rows["experience_id"]))
            counts.nulls += values.null_count()
            counts.scored += len(values) - values.null_count()
        if "reward" in self.rows.columns:
            self.rows = self.rows.with_columns(reward=self.ledger.rewards(self.rows["experience_id"]))

    def _take_added(self, planned: PlannedOperator, positions: pl.Series, result: Result, counts: _Counts) -> None:
        if result.added is None or result.added.height == 0:
            return
        ids = self.rows["experience_id"].gather(positions)
        rows = moved_spans(result.added, ids)
        if "spans" in rows.columns:
            named = pl.element().struct.rename_fields(["experience_id", "start", "stop", "trained"])
            rows = rows.with_columns(pl.col("spans").list.eval(named))
        rows = rows.with_columns(parent_id=ids.gather(rows["parent"]), made_by=pl.lit(planned.id))
        self.added.append(rows.select("parent_id", "made_by", pl.exclude("parent", "parent_id", "made_by")))
        counts.added = rows.height

    def _take_verdicts(
        self,
        planned: PlannedOperator,
        positions: pl.Series,
        result: Result,
        errors: list[tuple[int, str]],
        counts: _Counts,
    ) -> None:
        policy = planned.operator.config.on_error
        if errors and policy == "raise":
            row, text = min(errors)
            raise OperatorError(
                f"operator #{planned.position} {planned.id!r} failed on row {self.rows['experience_id'][row]!r}: "
                f"{text} ({len(errors)} rows failed; on_error: reject or hold goes on without them)"
            )
        ids = self.rows["experience_id"]
        failed = pl.DataFrame(
            {
                "experience_id": [ids[row] for row, _ in errors],
                "verdict": [policy] * len(errors),
                "reason": ["error"] * len(errors),
                "detail": [text for _, text in errors],
                "ref_id": [None] * len(errors),
            },
            schema={name: pl.String() for name in ("experience_id", "verdict", "reason", "detail", "ref_id")},
        )
        judged = failed
        if result.verdicts is not None:
            said = result.verdicts.with_columns(experience_id=ids.gather(positions.gather(result.verdicts["row"])))
            judged = pl.concat([said.select(failed.columns), failed])
        self._decide(judged, planned.id, planned.position)
        verdicts = judged["verdict"]
        counts.rejected = int((verdicts == "reject").sum())
        counts.held = int((verdicts == "hold").sum())
        counts.masked = int((verdicts == "mask").sum())
        counts.errors = len(errors)
        out = judged.filter(pl.col("verdict") != "mask")["experience_id"]
        self.rows = self.rows.with_columns(alive=self.rows["alive"] & ~ids.is_in(out.to_list()))

    def _decide(self, judged: pl.DataFrame, operator: str, position: int | None) -> None:
        absent = [pl.lit(None).alias(name) for name in ("detail", "ref_id") if name not in judged.columns]
        rows = judged.with_columns(*absent, operator=pl.lit(operator), position=pl.lit(position))
        self.decisions.append(rows.select(pl.col(name).cast(dtype) for name, dtype in _DECISION_SCHEMA.items()))

    def result(self, *, run_id: str, pass_id: str, now: datetime) -> CurationResult:
        """Everything as rows for the store."""
        origin = {"run_id": pl.lit(run_id), "pass_id": pl.lit(pass_id)}
        scores = pl.concat(self.scores) if self.scores else self.ledger.written.with_columns(
            comment=pl.lit(None, dtype=pl.String), author=pl.lit(None, dtype=pl.String)
        )  # fmt: skip
        runs = pl.DataFrame(
            [
                {"position": position, "operator": name, "type": kind, "fingerprint": mark}
                | {counter: getattr(counts, counter) for counter in _Counts.__slots__}
                for position, name, kind, mark, counts in self.runs
            ]
        )
        empty = pl.DataFrame(schema=_ADDED_SCHEMA | {"messages": pl.List(pl.Struct({"role": pl.String()}))})
        return CurationResult(
            scores=_table(
                scores.with_columns(source=pl.lit("operator"), run_id=pl.lit(run_id), scored_at=pl.lit(now)),
                SCORES.schema,
            ),
            decisions=_table(
                pl.concat(self.decisions).with_columns(**origin, decided_at=pl.lit(now)), DECISIONS.schema
            ),
            runs=_table(runs.with_columns(**origin, created_at=pl.lit(now)), OPERATOR_RUNS.schema),
            added=pl.concat(self.added, how="diagonal") if self.added else empty,
            survivors=self.rows.filter("alive").drop("alive"),
        )


def _condition(where: pl.Expr, frame: pl.DataFrame) -> tuple[pl.Series, list[tuple[int, str]]]:
    """Which rows match; a condition that fails on the frame is tried row by row, and its failures are returned."""
    try:
        return frame.with_columns(where.alias("matches__"))["matches__"].cast(pl.Boolean).fill_null(False), []
    except pl.exceptions.PolarsError:
        matches: list[bool] = []
        failures: list[tuple[int, str]] = []
        # A Python loop: taken only when the condition fails somewhere, to find out where.
        for row in range(frame.height):
            try:
                value = frame[row].with_columns(where.alias("matches__"))["matches__"][0]
            except pl.exceptions.PolarsError as error:
                failures.append((row, f"where: {describe(error)}"))
                value = False
            matches.append(bool(value))
        return pl.Series(matches, dtype=pl.Boolean), failures


def _replaced(old: pl.Series, positions: pl.Series, new: pl.Series) -> pl.Series:
    """`old` with the values at `positions` replaced; works for every type, which `scatter` does not."""
    source = pl.int_range(len(old), eager=True).cast(pl.Int64)
    places = pl.int_range(len(old), len(old) + len(new), eager=True).cast(pl.Int64)
    return pl.concat([old, new.alias(old.name)]).gather(source.scatter(positions, places))


def _table(frame: pl.DataFrame, schema: pa.Schema) -> pa.Table:
    ordered = frame.select(schema.names)
    return ordered.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(schema)
