"""`buffer-engine what-if`: a training batch beside what it would have been."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from buffer_engine.errors import UsageError
from buffer_engine.store.opening import open_store
from pipelines.cli.console import print_text, results
from pipelines.cli.opening import require_store
from pipelines.cli.rendering import cell_text, render_result
from pipelines.lineage.changes import parse_changes
from pipelines.lineage.finding import find_batch
from pipelines.lineage.what_if import WhatIf
from pipelines.lineage.what_if import what_if as compare


def what_if(
    store: Annotated[Path, typer.Argument(help="folder of the store")],
    batch: Annotated[int, typer.Option("--batch", help="optimizer step whose batch to compare")],
    run: Annotated[
        str | None, typer.Option("--run", help="run of the batch; needed when the store has several")
    ] = None,
    without: Annotated[str | None, typer.Option("--without", help="leave out this operator")] = None,
    scores: Annotated[
        list[str] | None,
        typer.Option("--score", help="NAME@v2, NAME@latest, or NAME=EXPRESSION over the columns of a row"),
    ] = None,
    weights: Annotated[list[str] | None, typer.Option("--weight", help="NAME=X: share in the reward")] = None,
) -> None:
    """Say what another operator list, score or weight would have done to a batch. Trains nothing, writes nothing.

    Starts from what was known when the batch was made; `--score NAME@latest` brings in what was scored since.
    """
    changes = parse_changes(without=without, scores=scores or (), weights=weights or ())
    if without is None and not scores and not weights:
        raise UsageError("what should be different? --without OPERATOR, --score NAME@v2 or --weight NAME=X")
    with open_store(require_store(store), read_only=True) as opened:
        _print(compare(opened, find_batch(opened, step=batch, run_id=run), changes))


def _print(answer: WhatIf) -> None:
    print_text(f"batch {answer.batch_id} of run {answer.run_id}: nothing was trained or written\n")
    wide = results.width if results.is_terminal else None
    print_text(render_result(answer.rows.to_arrow(), width=wide, most_rows=None, longest_cell=None)[0])
    print_text("")
    longest = max(len(name) for name, _, _ in answer.summary)
    for name, before, after in answer.summary:
        first = "" if before is None else f"{cell_text(before)} → "
        results.print(Text.assemble((f"{name:<{longest}}  ", "bold"), f"{first}{cell_text(after)}"), soft_wrap=True)
    for note in answer.notes:
        results.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
