"""What a run achieved: a text for the terminal and a plot for a file, both from the store alone.

A higher solve rate can mean two things: more replies of the right form, or more right answers among those. The report
keeps them apart: solve rate = share parsable × share right among the parsable, and the gain is split accordingly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from buffer_engine.errors import UsageError
from buffer_engine.extras import require
from buffer_engine.inspect import Inspection, connect_store
from pipelines.cli.rendering import cell_text, result_table

if TYPE_CHECKING:
    from buffer_engine.store.base import ExperienceStore

Curve = list[tuple[int, float]]
"""(step, value), by step; undefined values are left out."""


@dataclass(frozen=True, slots=True)
class GainSplit:
    """Where a change of the solve rate came from; the parts add up to `total`.

    Attributes:
        form: from more (or fewer) parsable replies.
        skill: from more (or fewer) right answers among the parsable; None: unknown, nothing was parsable before.
        other: right answers that do not count as parsable.
    """

    total: float
    form: float
    skill: float | None
    other: float


def split_gain(
    solved: tuple[float, float], parsable: tuple[float, float], right: tuple[float | None, float | None]
) -> GainSplit:
    """Split a change of solve rate into form and skill; each tuple is (before, after).

    With s = p·r the change is Δp·mean(r) + Δr·mean(p), which is exact and treats before and after alike.
    """
    total = solved[1] - solved[0]
    spread = parsable[1] - parsable[0]
    before, after = right
    if before is None or after is None:
        known = after if after is not None else before if before is not None else 0.0
        return GainSplit(total, spread * known, None, total - spread * known)
    form = spread * (before + after) / 2
    skill = (after - before) * (parsable[0] + parsable[1]) / 2
    return GainSplit(total, form, skill, total - form - skill)


def text_report(store: ExperienceStore | Path | str, run_id: str) -> RenderableType:
    """Solve rate before and after, form against skill, rows, funnel and speed of one run.

    Raises:
        UsageError: the store has no such run; names the known ones.
    """
    with connect_store(store) as inspection:
        run = _run(inspection, run_id)
        curves = _curves(inspection, run_id)
        parts: list[RenderableType] = [
            Text.assemble(
                ("run ", "bold"), (run_id, "bold"), f": {run['steps']} steps, weights {cell_text(run['model_version'])}"
            ),
            *_heldout(curves),
            Text(
                f"rollouts {run['rollouts']:,} (held-out {run['eval_rollouts']:,}): kept {run['kept']:,}, "
                f"rejected {run['rejected']:,}, held {run['held']:,}, failed {run['errors']:,}, "
                f"trained {run['trained']:,}"
            ),
        ]
        reward = curves.get("explore/reward_mean", [])
        if reward:
            parts.append(
                Text(f"reward while exploring: {reward[0][1]:.3f} at step {reward[0][0]}, {reward[-1][1]:.3f} at step "
                     f"{reward[-1][0]}")
            )  # fmt: skip
        speeds = [
            f"{label} {_mean(curves[name]):,.0f}"
            for label, name in (("exploring", "explore/tokens_per_second"), ("training", "train/tokens_per_second"))
            if curves.get(name)
        ]
        if speeds:
            parts.append(Text("tokens per second: " + ", ".join(speeds)))
        funnel = inspection.rows(
            "SELECT operator, rows_in, kept, rejected, held, masked, added, scored, nulls, errors FROM funnel "
            "WHERE run_id = $1 ORDER BY position, operator",
            [run_id],
        )
        if funnel:
            columns = [
                name for name in funnel[0] if name in ("operator", "rows_in", "kept") or any(r[name] for r in funnel)
            ]
            cells = [[row[name] if name == "operator" else f"{row[name]:,}" for name in columns] for row in funnel]
            parts += [Text(), result_table(columns, cells, [name != "operator" for name in columns])]
        return Group(*parts)


def write_reward_plot(store: ExperienceStore | Path | str, run_id: str, path: Path | str) -> None:
    """Write a PNG: reward and held-out solve rate by step, form against skill, and what curation kept.

    Raises:
        MissingExtraError: matplotlib is not installed.
        UsageError: the store has no such run.
    """
    require("matplotlib", "view")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with connect_store(store) as inspection:
        run = _run(inspection, run_id)
        curves = _curves(inspection, run_id)
    # A figure of its own, not pyplot's: no display, no global state.
    figure = Figure(figsize=(9.5, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplot_mosaic([["reward", "reward"], ["form", "kept"]], height_ratios=[1.35, 1.0])
    _draw_reward(panels["reward"], curves)
    _draw_form(panels["form"], curves)
    _draw_kept(panels["kept"], curves)
    figure.suptitle(f"{run_id}: {run['steps']} steps, {run['rollouts']:,} rollouts", fontsize=13, fontweight="bold")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)


def _run(inspection: Inspection, run_id: str) -> dict[str, Any]:
    runs = {row["run_id"]: row for row in inspection.rows("SELECT * FROM runs")}
    if run_id not in runs:
        known = ", ".join(sorted(runs)) or "none yet"
        raise UsageError(f"the store has no run {run_id!r}; runs: {known}")
    return runs[run_id]


def _curves(inspection: Inspection, run_id: str) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for row in inspection.rows(
        "SELECT name, step, value FROM metrics WHERE run_id = $1 AND value IS NOT NULL ORDER BY name, step", [run_id]
    ):
        curves.setdefault(row["name"], []).append((row["step"], row["value"]))
    return curves


def heldout_sets(curves: Mapping[str, Curve]) -> list[str]:
    """Names of the task sets that were evaluated."""
    return sorted(name.split("/")[1] for name in curves if name.startswith("eval/") and name.endswith("/solve_rate"))


def _heldout(curves: Mapping[str, Curve]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for tasks in heldout_sets(curves):
        solved = curves[f"eval/{tasks}/solve_rate"]
        first, last = solved[0], solved[-1]
        line = Text.assemble(
            f"{tasks} solve rate: {first[1]:.3f} before (step {first[0]}), {last[1]:.3f} after (step {last[0]}), ",
            (f"gain {last[1] - first[1]:+.3f}", "bold green" if last[1] > first[1] else "bold red"),
        )
        parts.append(line)
        rows = [
            [label, f"{curve[0][1]:.3f}", f"{curve[-1][1]:.3f}", f"{curve[-1][1] - curve[0][1]:+.3f}"]
            for label, name in _FORM
            if (curve := curves.get(f"eval/{tasks}/{name}"))
        ]
        if rows:
            parts.append(result_table([tasks, "before", "after", "gain"], rows, [False, True, True, True]))
        parts += _split(curves, tasks, first[0], last[0])
    return parts


_FORM = (
    ("ended in time", "ended"),
    ("parsable", "parsable"),
    ("right when parsable", "right_when_parsable"),
)


def _split(curves: Mapping[str, Curve], tasks: str, first: int, last: int) -> list[RenderableType]:
    values = {
        name: dict(curves.get(f"eval/{tasks}/{name}", [])) for name in ("solve_rate", "parsable", "right_when_parsable")
    }
    parsable = values["parsable"]
    if first == last or first not in parsable or last not in parsable:
        return []
    right = values["right_when_parsable"]
    split = split_gain(
        (values["solve_rate"][first], values["solve_rate"][last]),
        (parsable[first], parsable[last]),
        (right.get(first), right.get(last)),
    )
    skill = "skill unknown (nothing was parsable at one end)" if split.skill is None else f"skill {split.skill:+.3f}"
    other = f", other {split.other:+.3f}" if abs(split.other) >= 0.0005 else ""
    return [Text(f"of the gain {split.total:+.3f}: format {split.form:+.3f}, {skill}{other}")]


def _mean(curve: Sequence[tuple[int, float]]) -> float:
    return sum(value for _, value in curve) / len(curve)


BLUE, ORANGE, GREEN, RED, GREY = "#2f6db5", "#e07b1f", "#2a9d5c", "#c8452f", "#8a8f98"


def _draw_reward(axes: Any, curves: Mapping[str, Curve]) -> None:
    reward = curves.get("explore/reward_mean", [])
    if reward:
        steps, means = _columns(reward)
        spread = dict(curves.get("explore/reward_std", []))
        low = [mean - spread.get(step, 0.0) for step, mean in reward]
        high = [mean + spread.get(step, 0.0) for step, mean in reward]
        if spread:
            axes.fill_between(steps, low, high, color=BLUE, alpha=0.12, linewidth=0, label="± one deviation")
        axes.plot(steps, means, color=BLUE, linewidth=1.8, label="reward while exploring (mean)")
    for index, tasks in enumerate(heldout_sets(curves)):
        steps, rates = _columns(curves[f"eval/{tasks}/solve_rate"])
        color = (ORANGE, GREEN, RED)[index % 3]
        axes.plot(
            steps, rates, "o--", color=color, linewidth=1.2, markersize=7, label=f"solve rate on {tasks}", zorder=4
        )
        for place in sorted({0, len(steps) - 1}):
            axes.annotate(
                f"{rates[place]:.2f}", (steps[place], rates[place]), textcoords="offset points", xytext=(0, 9),
                ha="center", color=color, fontweight="bold", fontsize=10,
            )  # fmt: skip
    _finish(axes, "Reward and held-out solve rate", "value", empty="no reward has been recorded")


def _draw_form(axes: Any, curves: Mapping[str, Curve]) -> None:
    sets = heldout_sets(curves)
    for tasks in sets[:1]:
        for (label, name), color, marker in zip(_FORM, (GREY, BLUE, GREEN), ("s", "^", "o"), strict=True):
            curve = curves.get(f"eval/{tasks}/{name}")
            if curve:
                steps, shares = _columns(curve)
                axes.plot(steps, shares, marker=marker, color=color, linewidth=1.4, markersize=5, label=label)
    _finish(axes, f"Format against skill ({sets[0] if sets else 'held-out'})", "share", empty="no held-out evaluation")
    axes.set_ylim(-0.03, 1.08)


def _draw_kept(axes: Any, curves: Mapping[str, Curve]) -> None:
    kept, rejected = dict(curves.get("curate/kept", [])), dict(curves.get("curate/rejected", []))
    steps = [step for step in sorted({*kept, *rejected}) if kept.get(step, 0.0) + rejected.get(step, 0.0) > 0]
    shares = [kept.get(step, 0.0) / (kept.get(step, 0.0) + rejected.get(step, 0.0)) for step in steps]
    if steps:
        axes.bar(steps, shares, width=0.85, color=GREEN, alpha=0.75, label="kept")
        axes.bar(
            steps, [1 - share for share in shares], width=0.85, bottom=shares, color=RED, alpha=0.55, label="rejected"
        )
    _finish(axes, "Rows after curation", "share", empty="no curation pass")
    axes.set_ylim(0, 1.0)
    axes.grid(visible=False)
    if steps:
        # Bars fill the panel: the legend needs a ground of its own.
        axes.legend(fontsize=8.5, ncols=2, loc="lower right", frameon=True, framealpha=0.9, edgecolor="none")


def _columns(curve: Curve) -> tuple[list[int], list[float]]:
    return [step for step, _ in curve], [value for _, value in curve]


def _finish(axes: Any, title: str, ylabel: str, *, empty: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel("optimizer step", fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)
    axes.grid(visible=True, color="#d9dce1", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=9)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8.5, frameon=False, loc="best")
    else:
        axes.text(0.5, 0.5, empty, transform=axes.transAxes, ha="center", va="center", color=GREY)
