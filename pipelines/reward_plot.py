"""The plot of a run: reward (or loss) and solve rate by step, form against skill, and what curation kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from buffer_engine.extras import require
from buffer_engine.inspect import connect_store
from pipelines.run_numbers import FORM, Curve, headline, heldout_sets, run_curves, run_row, shows_loss

if TYPE_CHECKING:
    from buffer_engine.store.base import ExperienceStore

BLUE, ORANGE, GREEN, RED, GREY = "#2f6db5", "#e07b1f", "#2a9d5c", "#c8452f", "#8a8f98"
SET_COLORS = (ORANGE, GREEN, RED)

MOST_TICKS = 12

LABEL_ROOM = 0.13
"""Share of the panel's height that a number above or below a point takes."""


def write_reward_plot(store: ExperienceStore | Path | str, run_id: str, path: Path | str) -> None:
    """Write a PNG: reward and held-out solve rate by step, form against skill, and what curation kept.

    A run that learned from given rows shows its loss in place of a reward.

    Raises:
        MissingExtraError: matplotlib is not installed.
        UsageError: the store has no such run.
    """
    figure = reward_figure(store, run_id)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)


def reward_figure(store: ExperienceStore | Path | str, run_id: str) -> Any:
    """The figure that `write_reward_plot` saves; raises what it raises."""
    require("matplotlib", "view")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with connect_store(store) as inspection:
        run = run_row(inspection, run_id)
        curves = run_curves(inspection, run_id)
        [seen] = inspection.rows(
            "SELECT min(reward) AS low, max(reward) AS high FROM rewards WHERE run_id = $1", [run_id]
        )
    # A figure of its own, not pyplot's: no display, no global state.
    figure = Figure(figsize=(9.5, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplot_mosaic([["reward", "reward"], ["form", "kept"]], height_ratios=[1.35, 1.0])
    if shows_loss(run, curves):
        _draw_course(panels["reward"], curves, "train/loss", "loss", None)
    else:
        # A deviation reaches past rewards that exist; the band does not.
        _draw_course(panels["reward"], curves, "explore/reward_mean", "reward", (seen["low"], seen["high"]))
    _draw_form(panels["form"], curves)
    _draw_kept(panels["kept"], curves)
    title = f"{run_id}: {headline(run).split(';')[0]}, {run['rollouts']:,} rollouts"
    figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure


def _draw_course(
    axes: Any, curves: Mapping[str, Curve], name: str, quantity: str, seen: tuple[float | None, float | None] | None
) -> None:
    """The metric on the left axis, held-out solve rates on an axis of their own at the right."""
    course, sets = curves.get(name, []), heldout_sets(curves)
    if course:
        steps, means = _columns(course)
        spread = dict(curves.get("explore/reward_std", [])) if seen is not None else {}
        if spread and seen is not None:
            deviation = np.array([spread.get(step, 0.0) for step in steps])
            low, high = np.array(means) - deviation, np.array(means) + deviation
            # fmax and fmin: a bound that is unknown (nan) does not bind.
            low, high = np.fmax(low, _number(seen[0])), np.fmin(high, _number(seen[1]))
            axes.fill_between(steps, low, high, color=BLUE, alpha=0.12, linewidth=0, label="± one deviation")
        label = "loss" if seen is None else "mean reward while exploring"
        marker = "o" if len(steps) == 1 else None
        axes.plot(steps, means, color=BLUE, linewidth=1.8, marker=marker, label=label)
    rates = axes.twinx() if course and sets else axes
    for index, tasks in enumerate(sets):
        steps, values = _columns(curves[f"eval/{tasks}/solve_rate"])
        color = SET_COLORS[index % len(SET_COLORS)]
        rates.plot(
            steps, values, "o--", color=color, linewidth=1.2, markersize=6, label=f"solve rate on {tasks}", zorder=4
        )
    title = " and ".join([*([quantity] if course else []), *(["held-out solve rate"] if sets else [])])
    _finish(axes, (title or quantity).capitalize(), quantity if course else "solve rate", empty=f"no {quantity} yet")
    if sets:
        rates.set_ylim(-0.04, 1.12)
        _evaluation_ticks(axes, curves)
    if rates is not axes:
        axes.yaxis.label.set_color(BLUE)
        rates.set_ylabel("solve rate", fontsize=9, color=SET_COLORS[0])
        rates.tick_params(labelsize=9)
        rates.spines[["top", "left"]].set_visible(False)
    entries = [each.get_legend_handles_labels() for each in dict.fromkeys((axes, rates))]
    if any(labels for _, labels in entries):
        handles, labels = ([part for entry in entries for part in entry[place]] for place in (0, 1))
        _legend_above(axes, handles, labels)
    _label_ends(axes, rates, course, {tasks: curves[f"eval/{tasks}/solve_rate"] for tasks in sets})


def _label_ends(axes: Any, rates: Any, course: Curve, solved: Mapping[str, Curve]) -> None:
    """First and last solve rate as numbers, on the side of the point where no other line passes."""
    lines = [(rates, curve) for curve in solved.values()] + ([(axes, course)] if course else [])
    for index, curve in enumerate(solved.values()):
        for step, value in dict([curve[0], curve[-1]]).items():
            own = _height(rates, value)
            others = [
                _height(panel, float(np.interp(step, *_columns(line)))) - own
                for panel, line in lines
                if line is not curve
            ]
            above = min((gap for gap in others if gap >= 0), default=1.0)
            below = min((-gap for gap in others if gap < 0), default=1.0)
            upward = above > LABEL_ROOM or above >= below
            rates.annotate(
                f"{value:.2f}", (step, value), textcoords="offset points", xytext=(0, 9 if upward else -9),
                ha="center", va="bottom" if upward else "top", color=SET_COLORS[index % len(SET_COLORS)],
                fontweight="bold", fontsize=10, zorder=6,
                bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
            )  # fmt: skip


def _height(axes: Any, value: float) -> float:
    """Place of a value between the lower (0) and the upper end (1) of its axis."""
    low, high = axes.get_ylim()
    return (value - low) / (high - low)


def _number(bound: float | None) -> float:
    return float("nan") if bound is None else bound


def _draw_form(axes: Any, curves: Mapping[str, Curve]) -> None:
    sets = heldout_sets(curves)
    for tasks in sets[:1]:
        for (label, name), color, marker in zip(FORM, (GREY, BLUE, GREEN), ("s", "^", "o"), strict=True):
            curve = curves.get(f"eval/{tasks}/{name}")
            if curve:
                steps, shares = _columns(curve)
                axes.plot(steps, shares, marker=marker, color=color, linewidth=1.4, markersize=5, label=label)
    _finish(axes, f"Format against skill ({sets[0] if sets else 'held-out'})", "share", empty="no held-out evaluation")
    axes.set_ylim(-0.03, 1.08)
    _evaluation_ticks(axes, curves)


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
        # Bars fill the panel, so the legend stands outside.
        _legend_above(axes, *axes.get_legend_handles_labels())


def _legend_above(axes: Any, handles: list[Any], labels: list[str]) -> None:
    axes.legend(
        handles, labels, fontsize=8.5, ncols=len(labels), loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False,
        borderaxespad=0.2, columnspacing=1.2,
    )  # fmt: skip


def _evaluation_ticks(axes: Any, curves: Mapping[str, Curve]) -> None:
    """Mark the steps that were evaluated, as many as can be read; a single one marks no scale."""
    steps = sorted({step for tasks in heldout_sets(curves) for step, _ in curves[f"eval/{tasks}/solve_rate"]})
    if len(steps) > 1:
        axes.set_xticks(steps[:: -(-len(steps) // MOST_TICKS)])


def _columns(curve: Curve) -> tuple[list[int], list[float]]:
    return [step for step, _ in curve], [value for _, value in curve]


def _finish(axes: Any, title: str, ylabel: str, *, empty: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel("step", fontsize=9)
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
