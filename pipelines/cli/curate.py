"""`buffer-engine curate`: pass the rollouts of a store that have no verdict through a specification's operators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.console import logs, results
from pipelines.load import load_spec
from pipelines.runner import start_run


def curate(
    file: Annotated[Path, typer.Argument(help="specification (YAML); its run is the one curated")],
    store: Annotated[Path | None, typer.Option("--store", help="store to use instead of the specification's")] = None,
    set_values: Annotated[list[str] | None, typer.Option("--set", help="override one value")] = None,
) -> None:
    """Curate what is new: the same as `run FILE --only curate`. Imports that are not in the store yet come first."""
    overrides = [*(set_values or []), *([f"store.path={json.dumps(str(store))}"] if store is not None else [])]
    report = start_run(load_spec(file, overrides=tuple(overrides)), logs, parts=("curate",))
    results.print(f"run {report.run_id}: {report.outcome.curated_rows} rows curated in {report.folder}")
