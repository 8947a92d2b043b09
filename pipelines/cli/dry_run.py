"""`buffer-engine curate --dry-run`: what a pipeline, or two, would do to stored rows, as tables or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from buffer_engine.errors import UsageError
from buffer_engine.store import open_store
from buffer_engine.store.base import ExperienceStore
from pipelines.cli.console import logs, print_text, results
from pipelines.cli.opening import require_store
from pipelines.cli.rendering import plain_value, print_view, records_table
from pipelines.load import LoadedSpec, load_spec
from pipelines.plan import build_plan
from pipelines.progress import Progress
from pipelines.rehearsal.choosing import ChosenRows, choose_rows
from pipelines.rehearsal.comparing import Difference, compare
from pipelines.rehearsal.effects import Numbers, algorithm_of, effect
from pipelines.rehearsal.passes import Rehearsal, rehearse
from pipelines.secrets import reveal


@dataclass(frozen=True, slots=True)
class DryRunOptions:
    """What to go over and how much of it to show.

    Attributes:
        other: specification of the pipeline to compare with; None: none.
        run_id: only rows of this run; None: of all runs.
        sample: at most so many rows; None: all.
        examples: rows shown per reason.
        as_json: everything as one JSON object on stdout.
    """

    other: Path | None = None
    run_id: str | None = None
    sample: int | None = None
    examples: int = 3
    as_json: bool = False


def dry_run(file: Path, overrides: Sequence[str], options: DryRunOptions) -> None:
    """Print what the operators of a specification would do to the rows of its store. Nothing is written.

    Raises:
        UsageError: there is no store or no row, or an option makes no sense.
        ConfigError: a specification is wrong.
    """
    if options.examples < 0:
        raise UsageError(f"--examples {options.examples}: it must be 0 or more")
    loaded = load_spec(file, overrides=tuple(overrides))
    folder = require_store(Path(reveal(loaded.spec.store).path))
    sides = [loaded]
    if options.other is not None:
        place = f"store.path={json.dumps(str(folder))}"
        sides.append(load_spec(options.other, overrides=(place,)))
    with open_store(folder, read_only=True) as store:
        chosen = choose_rows(store, run_id=options.run_id, sample=options.sample, seed=loaded.spec.seed)
        rehearsals = [_rehearse(store, side, chosen, options) for side in sides]
        difference = compare(store, *rehearsals, examples=options.examples) if len(rehearsals) == 2 else None
    numbers = _effects(sides, rehearsals)
    if options.as_json:
        found = _as_data(folder, chosen, sides, rehearsals, numbers, difference)
        print_text(json.dumps(plain_value(found), ensure_ascii=False, indent=2))
        return
    _print_head(folder, chosen)
    for side, rehearsal in zip(sides, rehearsals, strict=True):
        _print_operators(side.file, rehearsal)
    if difference is not None:
        _print_difference(difference)
    _print_effects(sides, numbers)


def _rehearse(store: ExperienceStore, side: LoadedSpec, chosen: ChosenRows, options: DryRunOptions) -> Rehearsal:
    plan = build_plan(side)
    with plan.operators, Progress(logs).phase(f"going through {side.file.name}", total=chosen.rows) as advance:
        return rehearse(store, plan, chosen, examples=options.examples, advance=advance)


def _effects(sides: Sequence[LoadedSpec], rehearsals: Sequence[Rehearsal]) -> list[tuple[str, Numbers]]:
    """`before`, and then one column per pipeline; each pipeline's own algorithm makes its advantages."""
    columns: list[tuple[str, Numbers]] = [
        ("before", effect(rehearsals[0].rows, "before", algorithm_of(sides[0].spec))),
    ]
    labels = ["after"] if len(sides) == 1 else _labels(sides)
    for label, side, rehearsal in zip(labels, sides, rehearsals, strict=True):
        columns.append((label, effect(rehearsal.rows, "after", algorithm_of(side.spec))))
    return columns


def _labels(sides: Sequence[LoadedSpec]) -> list[str]:
    """What the two pipelines are called; the same file twice differs by what `--set` changed in the first."""
    for names in ([side.file.name for side in sides], [str(side.file) for side in sides]):
        if len(set(names)) == len(names):
            return names
    return [f"{side.file.name} ({place})" for side, place in zip(sides, ("first", "second"), strict=True)]


def _as_data(
    folder: Path,
    chosen: ChosenRows,
    sides: Sequence[LoadedSpec],
    rehearsals: Sequence[Rehearsal],
    numbers: Sequence[tuple[str, Numbers]],
    difference: Difference | None,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "store": str(folder),
        "rows": chosen.rows,
        "groups": chosen.groups,
        "available_rows": chosen.available,
        "rows_made_by_operators": chosen.made_by_operators,
        "pipelines": [
            {
                "file": str(side.file),
                "name": rehearsal.name,
                "operators": [asdict(operator) for operator in rehearsal.operators],
                "fates": rehearsal.examples.fates,
                "changes": [
                    {"operator": operator, "column": column, "rows": rows}
                    for (operator, column), rows in rehearsal.changed.items()
                ],
                "change_examples": rehearsal.examples.changes,
            }
            for side, rehearsal in zip(sides, rehearsals, strict=True)
        ],
        "effect": dict(numbers),
    }
    if difference is not None:
        found["difference"] = {
            "same_fate": difference.same,
            "kept_by_both_with_another_reward": difference.other_rewards,
            "fates": difference.fates,
            "rows": difference.rows.to_dicts(),
        }
    return found


def _print_head(folder: Path, chosen: ChosenRows) -> None:
    part = "" if chosen.rows == chosen.available else f" of {chosen.available:,}"
    print_text(f"dry run over {chosen.rows:,}{part} rows in {chosen.groups:,} groups of {folder}: nothing is written")
    if chosen.made_by_operators:
        print_text(f"{chosen.made_by_operators:,} rows that operators made are left out; they would be made again")


def _print_operators(file: Path, rehearsal: Rehearsal) -> None:
    _title(f"{file}")
    print_view(records_table([_shown(asdict(operator)) for operator in rehearsal.operators]))
    added = sum(operator.added for operator in rehearsal.operators)
    if added:
        print_text(f"the {added:,} added rows would be judged in a later pass, which is not part of this")
    for fate in rehearsal.examples.fates:
        print_text(f"\n{fate['verdict']} by {fate['operator']}: {fate['reason']}, {fate['rows']:,} rows")
        for example in fate["examples"]:
            detail = "" if example["detail"] is None else f"  ({example['detail']})"
            print_text(f"  {example['experience_id']}  {example['text']!r}{detail}")
    for (operator, column), rows in rehearsal.changed.items():
        print_text(f"\nchanged by {operator}: {column}, {rows:,} rows")
        for change in rehearsal.examples.changes:
            if (change["operator"], change["column"]) == (operator, column):
                print_text(f"  {change['experience_id']}  {change['before']!r}\n    → {change['after']!r}")


def _shown(operator: Mapping[str, Any]) -> dict[str, Any]:
    """The line of one operator in the table."""
    counts = ("rejected", "held", "masked", "added", "changed", "scored", "nulls", "errors")
    shown: dict[str, Any] = {"operator": operator["operator"], "in": operator["rows_in"], "kept": operator["kept"]}
    shown |= {name: operator[name] for name in counts}
    return shown | {"mean": "" if operator["mean"] is None else f"{operator['mean']:.6g}"}


def _print_difference(difference: Difference) -> None:
    _title("rows with another fate")
    print_text(
        f"{difference.rows.height:,} rows differ, {difference.same:,} do not; "
        f"{difference.other_rewards:,} rows that both keep have another reward"
    )
    for pair in difference.fates:
        print_text(f"\n{pair['rows']:,} rows: {pair['first']} → {pair['second']}")
        for example in pair["examples"]:
            details = [text for text in (example["first_detail"], example["second_detail"]) if text is not None]
            said = f"  ({' → '.join(details)})" if details else ""
            print_text(f"  {example['experience_id']}  {example['text']!r}{said}")


def _print_effects(sides: Sequence[LoadedSpec], numbers: Sequence[tuple[str, Numbers]]) -> None:
    _title("effect")
    names = list(dict.fromkeys(name for _, values in numbers for name in values))
    print_view(records_table([{"": name} | {label: values.get(name) for label, values in numbers} for name in names]))
    if any(algorithm_of(side.spec) is None for side in sides):
        print_text("no advantages where the specification has no trainer")


def _title(text: str) -> None:
    results.print()
    results.print(Text(text, style="bold"), soft_wrap=True)
