"""`buffer-engine import-recipe`: a recipe of Data-Juicer as an `operators:` list."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated

import typer
from ruamel.yaml import YAML

from buffer_engine.errors import UsageError
from operators.bridge.juicer_recipe import ImportedRecipe, import_recipe
from pipelines.cli.console import logs, print_text
from pipelines.yaml_text import read_document


def import_recipe_file(
    file: Annotated[Path, typer.Argument(help="recipe of Data-Juicer, YAML")],
    column: Annotated[str, typer.Option("--column", help="text column that its operators work on")] = "response",
    out: Annotated[Path | None, typer.Option("--out", help="file to write; default: print it")] = None,
) -> None:
    """Write the operators of a Data-Juicer recipe as an `operators:` list for a specification.

    An operator becomes the native one where both give the same answer to every text, else an entry `data_juicer`. What
    could not be taken over stands in comments at the top, and on stderr.
    """
    if out is not None and out.exists():
        raise UsageError(f"{out} is there already → name another file with --out")
    recipe = import_recipe(read_document(file).data, column=column)
    text = as_yaml(recipe, file.name)
    for line in recipe.missing:
        logs.print(f"not taken over: {line}", markup=False, soft_wrap=True)
    if out is None:
        print_text(text.rstrip("\n"))
    else:
        out.write_text(text, encoding="utf-8")
        logs.print(
            f"{out}: {len(recipe.operators)} operators, {len(recipe.missing)} not taken over",
            markup=False,
            soft_wrap=True,
        )


def as_yaml(recipe: ImportedRecipe, name: str) -> str:
    """The list as YAML, with what was not taken over and what to look at in comments."""
    lines = [f"Imported from {name}, a recipe of Data-Juicer."]
    for title, texts in (("Not taken over:", recipe.missing), ("Look at:", recipe.remarks)):
        lines += [title, *(f"  - {' '.join(text.split())}" for text in texts)] if texts else []
    writer = YAML()
    writer.width = 120
    text = io.StringIO()
    writer.dump({"operators": [dict(entry) for entry in recipe.operators]}, text)
    return "\n".join(f"# {line}" for line in lines) + "\n" + text.getvalue()
