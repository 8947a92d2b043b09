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
    peers: Annotated[str, typer.Option(help="comma-separated names; default: all")] = "",
    growth: Annotated[
        str, typer.Option(help="largest size of the growth table: none, 10k, 100k, 1m or 10m; --quick: none")
    ] = "1m",
    output: Annotated[
        Path | None, typer.Option(help="folder for store.json, store.md, store.png and growth.png")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="a page whose marked part is replaced by this run, say docs/benchmarks.md")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="few rows: does everything work? Not for quoting")] = False,
    folder: Annotated[
        Path | None, typer.Option(help="where to write the data: the disk that is measured; default: current folder")
    ] = None,
) -> None:
    """The store beside other storages: the same rows, appends, batches, scores, SQL, several writers, growth.

    In brackets: how many times as good ours is (below 1: how many times worse). Processor time is the steadier
    number on a machine that does other work. `python -m benchmarks.store.peers_env` installs the peers.
    """
    try:
        from benchmarks.store import pages, report
        from benchmarks.store.growth import sizes_to
        from benchmarks.store.peers import KINDS
        from benchmarks.store.targets import target_rows
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
    try:
        sizes = sizes_to("none" if quick else growth.lower())
    except ValueError as error:
        raise UsageError(f"--growth {growth!r} is no size → none, 10k, 100k, 1m or 10m") from error
    if output is not None:
        require("matplotlib", "view")  # rather now than after minutes of measuring
    if write is not None:
        pages.check(write)
    done = report.run(
        [KINDS[name] for name in names],
        rows=min(rows, 2048) if quick else rows,
        quick=quick,
        growth=sizes,
        folder=folder or Path.cwd(),
        say=lambda text: logs.print(text, markup=False, soft_wrap=True),
    )
    grown = [report.growth_rows(done)] if done.growth else []
    for titles, cells in [report.table_rows(done), *grown, target_rows(done)]:
        results.print(result_table(titles, cells, [False, *([True] * (len(titles) - 1))]), soft_wrap=False)
    for line in [*done.note_lines(), *done.limit_lines()]:
        print_text(line)
    if output is not None:
        for path in report.save(done, output):
            print_text(f"written: {path}")
    if write is not None:
        pages.fill(write, "store", report.markdown(done))
        print_text(f"written: {write}")
