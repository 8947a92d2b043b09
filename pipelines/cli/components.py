"""`operators`, `schema` and `doctor`: what there is, what it means, and what this machine has of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from buffer_engine.errors import MissingExtraError, UsageError, did_you_mean
from buffer_engine.registry import Registry
from pipelines.cli.console import print_text


def _registries() -> Mapping[str, Callable[[], Registry]]:
    """Kinds of components by the word used for them, each imported when asked for."""

    def of(module: str, name: str) -> Callable[[], Registry]:
        def load() -> Registry:
            from importlib import import_module

            return getattr(import_module(module), name)

        return load

    return {
        "operators": of("operators.registry", "OPERATORS"),
        "tasks": of("explorers.registry", "TASKSETS"),
        "workflows": of("explorers.registry", "WORKFLOWS"),
        "models": of("explorers.registry", "MODELS"),
        "trainers": of("trainers.registry", "TRAINERS"),
        "algorithms": of("trainers.registry", "ALGORITHMS"),
        "advantages": of("trainers.registry", "ADVANTAGES"),
    }


def operators(
    name: Annotated[
        str | None, typer.Argument(help="explain this one, or `new` to write one; without a name, list all")
    ] = None,
    new_name: Annotated[str | None, typer.Argument(metavar="[NEW_NAME]", help="after `new`: its name")] = None,
    kind: Annotated[
        str,
        typer.Option(
            "--kind",
            help="operators | tasks | workflows | models | trainers | algorithms | advantages; after `new` the family: "
            "clean | format | filter | score | reward | dedup | group | augment | select",
        ),
    ] = "operators",
    into: Annotated[Path | None, typer.Option("--into", help="after `new`: folder of a plug-in to write it to")] = None,
) -> None:
    """List operators, or explain one: its fields, what it reads and writes. Other components with --kind.

    `operators new NAME --kind filter` writes a new operator with its test, to begin from.
    """
    if name == "new":
        from pipelines.operator_template import new_operator

        if new_name is None:
            raise UsageError("operators new needs a name → buffer-engine operators new loud_filter --kind filter")
        print_text(new_operator(new_name, "filter" if kind == "operators" else kind, into=into, root=Path.cwd()))
        return
    if new_name is not None or into is not None:
        raise UsageError("a second name and --into belong to `operators new NAME`")
    from pipelines.reference import component_text, listing

    known = _registries()
    if kind not in known:
        raise UsageError(f"--kind {kind!r} is no kind of component → {did_you_mean(kind, known)}")
    registry = known[kind]()
    if name is None:
        print_text(listing(registry))
        return
    if name not in registry.names():
        elsewhere = [word for word in known if name in known[word]().names()]
        hint = f"use --kind {elsewhere[0]}" if elsewhere else did_you_mean(name, registry.names())
        raise UsageError(f"there is no {registry.kind} {name!r} → {hint}")
    print_text(component_text(registry, name))


def schema(
    table: Annotated[str | None, typer.Argument(help="only this table")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="as the reference page of the documentation")] = False,
) -> None:
    """Print the tables of a store with the meaning of every column."""
    from pipelines.reference import DOCUMENTED_TABLES, tables_markdown, tables_text

    if table is not None and table not in DOCUMENTED_TABLES:
        raise UsageError(f"there is no table {table!r} → {did_you_mean(table, DOCUMENTED_TABLES)}")
    names = [table] if table is not None else list(DOCUMENTED_TABLES)
    print_text((tables_markdown if markdown else tables_text)(names).rstrip("\n"))


def doctor(
    extra: Annotated[
        str | None, typer.Option("--require", help="fail with exit code 3 unless this extra is complete")
    ] = None,
) -> None:
    """Show versions, extras, processors, folders and disk space, and what may go wrong here."""
    from pipelines.diagnosis import EXTRAS, diagnosis_text, missing_of

    if extra is not None and extra not in EXTRAS:
        raise UsageError(f"there is no extra {extra!r} → {did_you_mean(extra, EXTRAS)}")
    print_text(diagnosis_text())
    if extra is not None and missing_of(extra):
        raise MissingExtraError.of(missing_of(extra)[0], extra)
