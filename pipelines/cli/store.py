"""`buffer-engine store`: what is in a store, and whether it is sound."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from buffer_engine.errors import CorruptSegmentError, StoreError
from buffer_engine.inspect import connect_store
from buffer_engine.store.base import ExperienceStore, Finding
from buffer_engine.store.local import open_store
from pipelines.cli.console import print_text, results
from pipelines.cli.opening import require_store
from pipelines.cli.rendering import cell_text, result_table

store = typer.Typer(no_args_is_help=True, add_completion=False, help="Verify a store, or show what is in it.")


@store.command()
def info(folder: Annotated[Path, typer.Argument(metavar="STORE", help="folder of the store")]) -> None:
    """Rows and bytes per table, and how far its runs came."""
    with open_store(require_store(folder), read_only=True) as opened, connect_store(opened) as inspection:
        found = opened.info()
        print_text(f"{found.path}: schema version {found.schema_version}, version {found.version}")
        names = sorted({*found.rows, *found.bytes})
        cells = [[name, f"{found.rows.get(name, 0):,}", f"{found.bytes.get(name, 0):,}"] for name in names]
        cells.append(["all", f"{sum(found.rows.values()):,}", f"{sum(found.bytes.values()):,}"])
        results.print(result_table(["table", "rows", "bytes"], cells, [False, True, True]))
        runs = inspection.rows("SELECT * EXCLUDE (started_at) FROM runs")
        if runs:
            results.print()
            columns = list(runs[0])
            rows = [[cell_text(run[column]) for column in columns] for run in runs]
            right = [isinstance(runs[0][column], int | float) for column in columns]
            results.print(result_table(columns, rows, right))


@store.command()
def verify(folder: Annotated[Path, typer.Argument(metavar="STORE", help="folder of the store")]) -> None:
    """Check every checksum, length, key, reference and count. Exit code 1 when anything is wrong."""
    with open_store(require_store(folder), read_only=True) as opened:
        findings = opened.verify()
        books = _books(opened, damaged=bool(findings))
        unbalanced = [
            Finding(
                "conservation",
                f"run {book['run_id']}, {book['scope']}",
                f"{book['check_name']}: {book['expected']} expected, {book['found']} found ({book['detail']})",
            )
            for book in books
            if not book["balanced"]
        ]
        rows = sum(opened.info().rows.values())
    # The store's own check and the view may tell of the same imbalance.
    told = {finding.where for finding in findings if finding.kind == "conservation"}
    findings = [*findings, *(finding for finding in unbalanced if finding.where not in told)]
    if findings:
        cells = [[finding.kind, finding.where, finding.message] for finding in findings]
        results.print(result_table(["kind", "where", "finding"], cells, [False, False, False]))
        raise StoreError(f"{folder}: {len(findings)} findings; what is not named is sound")
    results.print(
        Text(f"{folder}: sound. {rows:,} rows read and checked (checksums, lengths, keys, references, uses); "
             f"{len(books)} books balance."),
        soft_wrap=True,
    )  # fmt: skip


def _books(opened: ExperienceStore, *, damaged: bool) -> list[dict[str, Any]]:
    """Lines of the view `conservation`; none when the files it would be read from are already known to be damaged."""
    try:
        with connect_store(opened) as inspection:
            return inspection.rows("SELECT * FROM conservation")
    except CorruptSegmentError:
        if damaged:
            return []
        raise
