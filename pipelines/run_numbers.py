"""The numbers of one run that reports and plots are made of, read from a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from buffer_engine.errors import UsageError
from buffer_engine.inspect import Inspection

Curve = list[tuple[int, float]]
"""(step, value), by step; undefined values are left out."""

FORM = (
    ("ended in time", "ended"),
    ("parsable", "parsable"),
    ("right when parsable", "right_when_parsable"),
)
"""Label and metric of what a solve rate is made of."""


def run_row(inspection: Inspection, run_id: str) -> dict[str, Any]:
    """The run's line of the view `runs`.

    Raises:
        UsageError: the store has no such run; names the known ones.
    """
    runs = {row["run_id"]: row for row in inspection.rows("SELECT * FROM runs")}
    if run_id not in runs:
        known = ", ".join(sorted(runs)) or "none yet"
        raise UsageError(f"the store has no run {run_id!r}; runs: {known}")
    return runs[run_id]


def run_curves(inspection: Inspection, run_id: str) -> dict[str, Curve]:
    """Every metric of the run, by name."""
    curves: dict[str, Curve] = {}
    for row in inspection.rows(
        "SELECT name, step, value FROM metrics WHERE run_id = $1 AND value IS NOT NULL ORDER BY name, step", [run_id]
    ):
        curves.setdefault(row["name"], []).append((row["step"], row["value"]))
    return curves


def heldout_sets(curves: Mapping[str, Curve]) -> list[str]:
    """Names of the task sets that were evaluated."""
    return sorted(name.split("/")[1] for name in curves if name.startswith("eval/") and name.endswith("/solve_rate"))


def shows_loss(run: Mapping[str, Any], curves: Mapping[str, Curve]) -> bool:
    """Whether the run learned from rows it did not explore: then its loss tells the story, and no reward does."""
    return run["explored_rounds"] == 0 and bool(curves.get("train/loss"))


def headline(run: Mapping[str, Any]) -> str:
    """How far a run came: steps and weights where there is a trainer, rounds in any case."""
    rounds = f"{_count(run['explored_rounds'], 'round')} explored, {_count(run['curation_passes'], 'curation pass')}"
    if not run["has_trainer"]:
        return f"{rounds}; no trainer"
    weights = "" if run["model_version"] is None else f", weights {run['model_version']}"
    return f"{_count(run['steps'], 'optimizer step')}{weights}; {rounds}"


def fate_lines(inspection: Inspection, run: Mapping[str, Any]) -> list[str]:
    """What became of the rows, one line for each partition; held-out rows never train, so they are not added in."""
    lines: list[str] = []
    for row in inspection.rows(
        "SELECT partition, count(*) AS rollouts, count(error) AS errors, "
        "count(*) FILTER (WHERE status = 'new') AS new, count(*) FILTER (WHERE status = 'kept') AS kept, "
        "count(*) FILTER (WHERE status = 'rejected') AS rejected, count(*) FILTER (WHERE status = 'held') AS held, "
        "count(*) FILTER (WHERE uses > 0) AS trained FROM raw.rollouts JOIN raw.rollout_state USING (experience_id) "
        "WHERE run_id = $1 GROUP BY partition ORDER BY partition = 'eval'",
        [run["run_id"]],
    ):
        counts = [f"{name} {row[name]:,}" for name in ("kept", "rejected", "held")]
        if row["new"]:
            counts.append(f"not curated {row['new']:,}")
        counts.append(f"failed {row['errors']:,}")
        if row["partition"] == "train" and run["has_trainer"]:
            counts.append(f"trained {row['trained']:,}")
        label = "held-out" if row["partition"] == "eval" else row["partition"]
        lines.append(f"{label} rollouts {row['rollouts']:,}: {', '.join(counts)}")
    return lines


def speeds(curves: Mapping[str, Curve]) -> list[str]:
    """Tokens per second over the whole run, all tokens over all seconds, and which tokens are counted."""
    lines: list[str] = []
    sampled = _total_rate(curves, "explore/tokens", "explore/seconds")
    if sampled is not None:
        lines.append(f"exploring: {sampled:,.0f} sampled tokens per second")
    trained = _total_rate(curves, "train/trained_tokens", "train/seconds")
    if trained is not None:
        # The trainer records what it computed only as a rate; times its seconds that is the count again.
        seconds = dict(curves["train/seconds"])
        counted = [
            (step, rate * seconds[step]) for step, rate in curves.get("train/tokens_per_second", []) if step in seconds
        ]
        computed = _total_rate({**curves, "computed": counted}, "computed", "train/seconds")
        beside = "" if computed is None else f" ({computed:,.0f} computed, prompts included)"
        lines.append(f"training: {trained:,.0f} trained tokens per second{beside}")
    return lines


def _total_rate(curves: Mapping[str, Curve], amount: str, seconds: str) -> float | None:
    """Sum over sum, of the steps that know both; None: no step does."""
    amounts, times = dict(curves.get(amount, [])), dict(curves.get(seconds, []))
    steps = [step for step in amounts if times.get(step, 0.0) > 0]
    return sum(amounts[step] for step in steps) / sum(times[step] for step in steps) if steps else None


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"
