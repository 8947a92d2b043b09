"""`buffer-engine report`: what a run did, once more, and its plot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from buffer_engine.errors import UsageError
from buffer_engine.inspect import connect_store
from pipelines.cli.console import logs
from pipelines.cli.opening import require_store
from pipelines.cli.rendering import print_view
from pipelines.report import text_report, write_reward_plot


def report(
    store: Annotated[Path, typer.Argument(help="folder of the store")],
    run: Annotated[str | None, typer.Option("--run", help="name of the run; needed when there are several")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="also write the reward curve to this PNG")] = None,
) -> None:
    """Print solve rate before and after, format and skill gain, the funnel and speeds of a run, finished or not."""
    folder = require_store(store)
    chosen = run or _only_run(folder)
    print_view(text_report(folder, chosen))
    if plot is not None:
        write_reward_plot(folder, chosen, plot)
        logs.print(f"plot: {plot}", highlight=False)


def _only_run(folder: Path) -> str:
    """The run of a store that has one.

    Raises:
        UsageError: it has none, or several.
    """
    with connect_store(folder) as inspection:
        names = [row["run_id"] for row in inspection.rows("SELECT DISTINCT run_id FROM runs ORDER BY 1")]
    if len(names) == 1:
        return names[0]
    if not names:
        raise UsageError(f"{folder} has no run yet")
    raise UsageError(f"{folder} has several runs ({', '.join(names)}): name one with --run")
