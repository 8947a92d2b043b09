"""`buffer-engine score --with`: stored rows through a score operator again, and the values before and after."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from buffer_engine.errors import UsageError
from buffer_engine.store import open_store
from operators.plan import OperatorPlan
from pipelines.cli.console import logs, print_text
from pipelines.cli.opening import require_store
from pipelines.cli.rendering import print_view, records_table
from pipelines.progress import Progress
from pipelines.rescoring.operator_file import compile_scoring, read_operators
from pipelines.rescoring.rescore import Rescored, author_of, rescore, weight_in_force
from pipelines.rescoring.selecting import Selection, component_scores, select_rows

_NAME = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:@v(?P<version>[0-9]+))?")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class RescoreOptions:
    """How to score again.

    Attributes:
        where: SQL condition on `experiences`; None: all rows.
        name: NAME or NAME@v2 of the component; None: the operator's id, the next version.
        chunk_rows: rows that become visible together.
        dry: only show what the scores would be.
    """

    where: str | None = None
    name: str | None = None
    chunk_rows: int = 1024
    dry: bool = False


def score_with(folder: Path, file: Path, options: RescoreOptions) -> None:
    """Score stored rows with the operator of a file, and print the values before and after.

    Raises:
        ConfigError: the file is wrong, or its operator does not fit the rows.
        UsageError: no row is meant, or a version is taken.
    """
    if options.chunk_rows < 1:
        raise UsageError(f"--chunk-rows {options.chunk_rows}: it must be at least 1")
    component, version = _parsed(options.name)
    configs = read_operators(file, component=component)
    require_store(folder)
    with open_store(folder, create=False, read_only=options.dry) as store:
        kinds = store.table("scores", columns=["name", "weight"])
        with compile_scoring(file, configs, store.table("tasks"), kinds) as plan:
            scores = component_scores(store, plan)
            weight = weight_in_force(plan, scores)
            selection = select_rows(
                store, where=options.where, scores=scores, component=plan.steps[-1].id,
                author=author_of(plan), version=version,
            )  # fmt: skip
            title = f"scoring {plan.steps[-1].id}"
            with Progress(logs).phase(title, total=selection.pending) as advance:
                found = rescore(
                    store, plan, selection, weight=weight, version=version, chunk_rows=options.chunk_rows,
                    write=not options.dry, advance=advance,
                )  # fmt: skip
            _print(folder, plan, selection, found, weight=weight, dry=options.dry)


def _parsed(name: str | None) -> tuple[str | None, int | None]:
    if name is None:
        return None, None
    match = _NAME.fullmatch(name)
    if match is None:
        raise UsageError(f"--name {name!r}: write NAME or NAME@v2; letters, digits and _, and no digit first")
    version = match.group("version")
    return match.group("name"), None if version is None else int(version)


def _print(
    folder: Path, plan: OperatorPlan, selection: Selection, found: Rescored, *, weight: float | None, dry: bool
) -> None:
    name = plan.steps[-1].id
    share = "a metric" if weight is None else f"weight {weight:g}"
    did = "would be scored; nothing is written" if dry else "scored"
    at = "" if found.version is None else f"; version {found.version}"
    print_text(f"{folder}: {found.scored:,} rows {did} ({name}, {share}, by {author_of(plan)}){at}")
    left = (
        (selection.done, "had this operator's score already"),
        (selection.failed, "are failed rollouts, which are never scored"),
        (found.unscored, "were left out by the operator or its `where`"),
        (len(found.errors), "failed and have no new score; the same command tries them again"),
    )
    for rows, said in left:
        if rows:
            print_text(f"{rows:,} rows {said}")
    for row_id, message in found.errors[:_SHOWN]:
        print_text(f"  {row_id}: {message}")
    if not found.scored:
        return
    before = found.after.select("experience_id").join(selection.before, on="experience_id")
    print_text("")
    print_view(records_table([_distribution("before", before), _distribution("after", found.after)]))
    both = found.after.join(before, on="experience_id", suffix="_before")
    moved = both.filter(pl.col("value").ne_missing(pl.col("value_before")))
    if both.height:
        print_text(f"{moved.height:,} of the {both.height:,} rows that had a score get another value")


def _distribution(label: str, frame: pl.DataFrame) -> dict[str, float | int | str | None]:
    values = frame["value"].drop_nulls()
    quantiles = {f"{share:.0%}": values.quantile(share, "nearest") for share in (0, 0.25, 0.5, 0.75, 1)}
    return {
        "": label, "rows": frame.height, "null": frame["value"].null_count(),
        "mean": values.mean(), "std": values.std(ddof=0), **quantiles,
    }  # type: ignore[dict-item]  # fmt: skip
