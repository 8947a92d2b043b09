"""What a run achieved: a text for the terminal and a plot for a file, both from the store alone.

A higher solve rate can mean two things: more replies of the right form, or more right answers among those. The report
keeps them apart: solve rate = share parsable × share right among the parsable, and the gain is split accordingly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from buffer_engine.inspect import connect_store
from pipelines.cli.rendering import result_table
from pipelines.reward_plot import write_reward_plot
from pipelines.run_numbers import (
    FORM,
    Curve,
    fate_lines,
    headline,
    heldout_sets,
    run_curves,
    run_row,
    shows_loss,
    speeds,
)

if TYPE_CHECKING:
    from buffer_engine.store.base import ExperienceStore

__all__ = ["GainSplit", "split_gain", "text_report", "write_reward_plot"]


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
    """Solve rate before and after, form against skill, rows, reward or loss, funnel and speed of one run.

    Raises:
        UsageError: the store has no such run; names the known ones.
    """
    with connect_store(store) as inspection:
        run = run_row(inspection, run_id)
        curves = run_curves(inspection, run_id)
        parts: list[RenderableType] = [
            Text.assemble(("run ", "bold"), (run_id, "bold"), f": {headline(run)}"),
            *_heldout(curves),
            *(Text(line) for line in fate_lines(inspection, run)),
            *_course(run, curves),
            *(Text(line) for line in speeds(curves)),
        ]
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


def _course(run: Mapping[str, object], curves: Mapping[str, Curve]) -> list[RenderableType]:
    """First and last reward of a run that explores, first and last loss of one that learns from given rows."""
    label, name = (
        ("loss", "train/loss") if shows_loss(run, curves) else ("reward while exploring", "explore/reward_mean")
    )
    curve = curves.get(name, [])
    if not curve:
        return []
    ends = curve[:1] if len(curve) == 1 else [curve[0], curve[-1]]
    return [Text(f"{label}: " + ", ".join(f"{value:.3f} at step {step}" for step, value in ends))]


def _heldout(curves: Mapping[str, Curve]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for tasks in heldout_sets(curves):
        solved = curves[f"eval/{tasks}/solve_rate"]
        first, last = solved[0], solved[-1]
        if first[0] == last[0]:
            parts.append(Text(f"{tasks} solve rate: {first[1]:.3f} at step {first[0]}, the only evaluation so far"))
            continue
        line = Text.assemble(
            f"{tasks} solve rate: {first[1]:.3f} before (step {first[0]}), {last[1]:.3f} after (step {last[0]}), ",
            (f"gain {last[1] - first[1]:+.3f}", "bold green" if last[1] > first[1] else "bold red"),
        )
        parts.append(line)
        rows = [
            [label, f"{curve[0][1]:.3f}", f"{curve[-1][1]:.3f}", f"{curve[-1][1] - curve[0][1]:+.3f}"]
            for label, name in FORM
            if (curve := curves.get(f"eval/{tasks}/{name}"))
        ]
        if rows:
            parts.append(result_table([tasks, "before", "after", "gain"], rows, [False, True, True, True]))
        parts += _split(curves, tasks, first[0], last[0])
    return parts


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
