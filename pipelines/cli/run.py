"""`buffer-engine run`: start or continue the run of a specification."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.console import logs, results, resumable
from pipelines.cli.parts import chosen_parts
from pipelines.load import load_spec
from pipelines.reporting import report_run
from pipelines.runner import start_run
from pipelines.secrets import reveal


def run(
    file: Annotated[Path, typer.Argument(help="specification (YAML)")],
    set_values: Annotated[
        list[str] | None, typer.Option("--set", help="override one value: --set trainer.optimizer.learning_rate=1e-5")
    ] = None,
    only: Annotated[str | None, typer.Option("--only", help="explore | curate | train: do only this stage")] = None,
) -> None:
    """Run a pipeline. An unfinished run of this name and configuration is continued; after a finished one a new run
    with the next number starts in the same store."""
    loaded = load_spec(file, overrides=tuple(set_values or ()))
    parts = chosen_parts(only)
    with resumable(Path(reveal(loaded.spec.store).path)):
        report = start_run(loaded, logs, parts=parts)
    report_run(report, loaded.spec, results, logs)
