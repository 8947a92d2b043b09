"""`buffer-engine bench`: speed measured beside peers, on this machine, in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from buffer_engine.errors import UsageError, did_you_mean
from buffer_engine.extras import require
from pipelines.cli.console import logs, print_text, results
from pipelines.cli.rendering import result_table

bench = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure speed beside peers, in one run.")


@bench.callback()
def _root() -> None:
    """Measure speed beside peers, in one run."""


@bench.command()
def store(
    rows: Annotated[int, typer.Option(min=1, help="rows appended in bulk, of about 1,000 tokens each")] = 12_288,
    peers: Annotated[str, typer.Option(help="comma-separated names; default: all that are installed")] = "",
    output: Annotated[Path | None, typer.Option(help="folder for store.json and store.png")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="few rows: does everything work? Not for quoting")] = False,
    folder: Annotated[
        Path | None, typer.Option(help="where to write the data: the disk that is measured; default: current folder")
    ] = None,
) -> None:
    """The store beside other storages: the same rows, appends, batches, scores, SQL, several writers.

    In brackets: how many times as good ours is (below 1: how many times worse). Processor time is the steadier
    number on a machine that does other work.
    """
    try:
        from benchmarks.store import report
        from benchmarks.store.peers import KINDS
    except ModuleNotFoundError as error:
        if error.name not in ("benchmarks", "benchmarks.store"):
            raise
        raise UsageError(
            "the benchmarks are part of the source tree and not of the installed package → "
            "clone the repository and run there: python -m pipelines.cli.main bench store"
        ) from error
    names = [name.strip() for name in peers.split(",") if name.strip()] or list(KINDS)
    for name in names:
        if name not in KINDS:
            raise UsageError(f"--peers {name!r} is no peer → {did_you_mean(name, KINDS)}")
    if output is not None:
        require("matplotlib", "view")  # rather now than after minutes of measuring
    done = report.run(
        [KINDS[name] for name in names],
        rows=min(rows, 2048) if quick else rows,
        quick=quick,
        folder=folder or Path.cwd(),
        say=lambda text: logs.print(text, markup=False, soft_wrap=True),
    )
    titles, cells = report.table_rows(done)
    results.print(result_table(titles, cells, [False, *([True] * (len(titles) - 1))]), soft_wrap=False)
    for line in [*report.absent_lines(done), *done.limit_lines()]:
        print_text(line)
    if output is not None:
        for path in report.save(done, output):
            print_text(f"written: {path}")
