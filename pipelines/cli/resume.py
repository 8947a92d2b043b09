"""`buffer-engine resume`: go on after a crash, a kill or a Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.console import logs, results, resumable
from pipelines.cli.opening import require_store
from pipelines.load import load_spec
from pipelines.reporting import report_run
from pipelines.runner import resume_run
from pipelines.runs import specification_path


def resume(
    store: Annotated[Path, typer.Argument(help="folder of the store")],
    run: Annotated[str | None, typer.Option("--run", help="name of the run, when several are unfinished")] = None,
    set_values: Annotated[
        list[str] | None, typer.Option("--set", help="change one value for the rest of the run; noted as an event")
    ] = None,
) -> None:
    """Continue an unfinished run from its newest checkpoint and its manifests, as if it had not been interrupted."""
    folder = require_store(store)
    with resumable(folder):
        report = resume_run(folder, logs, run_id=run, overrides=tuple(set_values or ()))
    spec = load_spec(specification_path(store, report.run_id), overrides=(f"store.path={json.dumps(str(store))}",)).spec
    report_run(report, spec, results, logs)
