"""`buffer-engine curate`: pass the rollouts of a store that have no verdict through a specification's operators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from buffer_engine.errors import UsageError
from pipelines.cli.console import logs, results
from pipelines.cli.dry_run import DryRunOptions, dry_run
from pipelines.load import load_spec
from pipelines.runner import start_run


def curate(
    file: Annotated[Path, typer.Argument(help="specification (YAML); its run is the one curated")],
    store: Annotated[Path | None, typer.Option("--store", help="store to use instead of the specification's")] = None,
    set_values: Annotated[list[str] | None, typer.Option("--set", help="override one value")] = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="say what the operators would do; write nothing")] = False,
    sample: Annotated[
        int | None, typer.Option("--sample", help="dry run over at most so many rows, whole groups drawn by the seed")
    ] = None,
    diff: Annotated[
        Path | None, typer.Option("--diff", help="dry run of this specification too, on the same rows, and compare")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="dry run over the rows of this run only")] = None,
    examples: Annotated[int, typer.Option("--examples", help="dry run: rows shown per reason")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="dry run: everything as one JSON object")] = False,
) -> None:
    """Curate what is new: the same as `run FILE --only curate`. Imports that are not in the store yet come first.

    With --dry-run the operators go over all stored training rows, judged or not, as if they were new.
    """
    overrides = [*(set_values or []), *([f"store.path={json.dumps(str(store))}"] if store is not None else [])]
    if dry:
        dry_run(file, overrides, DryRunOptions(diff, run, sample, examples, as_json))
        return
    for name, given in (("--sample", sample), ("--diff", diff), ("--run", run), ("--json", as_json or None)):
        if given is not None:
            raise UsageError(f"{name} is for dry runs: add --dry-run")
    report = start_run(load_spec(file, overrides=tuple(overrides)), logs, parts=("curate",))
    results.print(f"run {report.run_id}: {report.outcome.curated_rows} rows curated in {report.folder}")
