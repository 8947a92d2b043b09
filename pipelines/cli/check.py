"""`buffer-engine check`: is this specification sound? Loads no model, opens no store, needs no extra."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.console import print_problems, print_text
from pipelines.load import resolved_yaml
from pipelines.plan import check_file


def check(
    file: Annotated[Path, typer.Argument(help="specification (YAML)")],
    set_values: Annotated[
        list[str] | None, typer.Option("--set", help="override one value: --set loop.steps=5; may be repeated")
    ] = None,
    print_resolved: Annotated[
        bool, typer.Option("--print", help="print the whole specification with every default instead of the summary")
    ] = False,
) -> None:
    """Check a specification and say what it would do. All problems are reported at once on stderr; exit code 2."""
    plan = check_file(file, overrides=tuple(set_values or ()))
    print_problems(plan.warnings, file=file, kind="warning")
    print_text(resolved_yaml(plan.spec).rstrip("\n") if print_resolved else plan.summary)
