"""`buffer-engine store`: what is in a store, and whether it is sound."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from buffer_engine.errors import CorruptSegmentError, StoreError
from buffer_engine.inspect import connect_store
from buffer_engine.store.base import ExperienceStore, Finding
from buffer_engine.store.layout import CATALOG
from buffer_engine.store.local import open_store
from pipelines.cli import exchange
from pipelines.cli.console import print_text, results
from pipelines.cli.opening import require_store
from pipelines.cli.rendering import cell_text, print_view, result_table
from pipelines.run_numbers import fate_lines, headline

store = typer.Typer(no_args_is_help=True, add_completion=False, help="Verify a store, or show what is in it.")
exchange.register(store)


@store.command()
def info(folder: Annotated[Path, typer.Argument(metavar="STORE", help="folder of the store")]) -> None:
    """Rows and bytes per table, what takes room in the folder, and how far its runs came."""
    with open_store(require_store(folder), read_only=True) as opened, connect_store(opened) as inspection:
        found = opened.info()
        print_text(f"{found.path}: schema version {found.schema_version}, version {found.version}")
        names = sorted({*found.rows, *found.bytes})
        cells = [[name, f"{found.rows.get(name, 0):,}", f"{found.bytes.get(name, 0):,}"] for name in names]
        cells.append(["all", f"{sum(found.rows.values()):,}", f"{sum(found.bytes.values()):,}"])
        parts: list[RenderableType] = [result_table(["table", "rows", "bytes"], cells, [False, True, True]), Text()]
        sizes = folder_sizes(folder)
        sizes = [*sizes, ("all", sum(files for _, files, _ in sizes), sum(size for *_, size in sizes))]
        cells = [[name, f"{files:,}", f"{size:,}"] for name, files, size in sizes]
        parts.append(result_table(["in the folder", "files", "bytes"], cells, [False, True, True]))
        for run in inspection.rows("SELECT * FROM runs"):
            parts += [Text(), Text.assemble(("run ", "bold"), (run["run_id"], "bold"), f": {headline(run)}")]
            parts += [Text(f"  {line}") for line in fate_lines(inspection, run)]
            first, last = run["solve_rate_first"], run["solve_rate_last"]
            if first is not None:
                parts.append(Text(f"  held-out solve rate: first {first:.3f}, newest {last:.3f}"))
            parts.append(Text(f"  written {cell_text(run['started_at'])} to {cell_text(run['last_written_at'])} (UTC)"))
        print_view(Group(*parts))


def folder_sizes(folder: Path) -> list[tuple[str, int, int]]:
    """(what, files, bytes) of everything in a store's folder, each file counted in one line.

    Bytes are lengths of files: segments are allocated ahead, so they count more than their rows.
    """
    sizes: dict[str, list[int]] = {name: [0, 0] for name in ("catalog", "segments", "checkpoints", "weights", "media")}
    for place, _, files in os.walk(folder):
        top = Path(place).relative_to(folder).parts[:1]
        for file in files:
            try:
                size = os.lstat(Path(place, file)).st_size
            except FileNotFoundError:
                # A run that goes on may take a checkpoint away while this is counted.
                continue
            name = top[0] if top else "catalog" if file.startswith(CATALOG) else "other files"
            entry = sizes.setdefault(name, [0, 0])
            entry[0] += 1
            entry[1] += size
    return [(name, files, size) for name, (files, size) in sizes.items()]


@store.command()
def migrate(folder: Annotated[Path, typer.Argument(metavar="STORE", help="folder of the store")]) -> None:
    """Bring a store of an earlier schema version to this one; rows are not rewritten, a current store is left alone."""
    with open_store(require_store(folder), create=False) as opened:
        before, now = opened.migrated_from, opened.info().schema_version
    said = f"already has schema version {now}" if before is None else f"migrated from schema version {before} to {now}"
    print_text(f"{folder}: {said}")


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
        print_view(result_table(["kind", "where", "finding"], cells, [False, False, False]))
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
