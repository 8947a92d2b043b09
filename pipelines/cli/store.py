"""`buffer-engine store`: what is in a store, whether it is sound, and keeping it small."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from buffer_engine.errors import StoreError
from buffer_engine.inspect import connect_store
from buffer_engine.store.base import ExperienceStore, Finding, QuarantinedFrame, StoreInfo
from buffer_engine.store.layout import CATALOG
from buffer_engine.store.opening import open_store
from buffer_engine.store.recover import recover_store
from pipelines.cli import exchange
from pipelines.cli.console import print_text, results
from pipelines.cli.opening import require_store
from pipelines.cli.rendering import cell_text, print_view, result_table
from pipelines.cli.store_upkeep import compact, erase
from pipelines.run_numbers import fate_lines, headline

store = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Verify, show, compact, erase, export or import what is in a store.",
)
store.command()(compact)
store.command()(erase)
exchange.register(store)


@store.command()
def info(folder: Annotated[Path, typer.Argument(metavar="STORE", help="folder of the store")]) -> None:
    """Rows and bytes per table, what takes room in the folder, and how far its runs came."""
    with open_store(require_store(folder), read_only=True) as opened, connect_store(opened) as inspection:
        found = opened.info(tokens=True)
        print_text(f"{found.path}: schema version {found.schema_version}, version {found.version}")
        names = sorted({*found.rows, *found.bytes})
        sums = [(name, *(part.get(name, 0) for part in (found.rows, found.bytes, found.cold_bytes))) for name in names]
        sums.append(("all", *(sum(part.values()) for part in (found.rows, found.bytes, found.cold_bytes))))
        cells = [[name, f"{rows:,}", f"{size:,}", f"{size - cold:,}", f"{cold:,}"] for name, rows, size, cold in sums]
        header = ["table", "rows", "bytes", "as appended", "in Parquet"]
        parts: list[RenderableType] = [result_table(header, cells, [False, True, True, True, True])]
        parts += [*(Text(line) for line in size_lines(found)), Text()]
        sizes = folder_sizes(folder)
        sizes = [*sizes, ("all", sum(files for _, files, _ in sizes), sum(size for *_, size in sizes))]
        cells = [[name, f"{files:,}", f"{size:,}"] for name, files, size in sizes]
        parts.append(result_table(["in the folder", "files", "bytes"], cells, [False, True, True]))
        if found.quarantined:
            parts += [Text(), _damaged(found.quarantined, "in quarantine")]
        for run in inspection.rows("SELECT * FROM runs"):
            parts += [Text(), Text.assemble(("run ", "bold"), (run["run_id"], "bold"), f": {headline(run)}")]
            parts += [Text(f"  {line}") for line in fate_lines(inspection, run)]
            first, last = run["solve_rate_first"], run["solve_rate_last"]
            if first is not None:
                parts.append(Text(f"  held-out solve rate: first {first:.3f}, newest {last:.3f}"))
            parts.append(Text(f"  written {cell_text(run['started_at'])} to {cell_text(run['last_written_at'])} (UTC)"))
        print_view(Group(*parts))


def size_lines(found: StoreInfo) -> list[str]:
    """What a rollout and a trainable token take, and what the next compactions will free."""
    lines: list[str] = []
    if found.bytes_per_row is not None:
        line = f"rollouts: {found.bytes_per_row:,.0f} bytes a row"
        if found.bytes_per_trainable_token is not None:
            line += f", {found.bytes_per_trainable_token:,.1f} a trainable token ({found.trainable_tokens:,} of them)"
        lines.append(line)
    if found.retired_bytes:
        lines.append(f"{found.retired_bytes:,} bytes of files that no row lies in go with a later compaction")
    return lines


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
        # books cannot balance while rows are missing, and the missing rows are named already
        damaged = any(finding.kind in ("checksum", "torn", "quarantine") for finding in findings)
        books = [] if damaged else _books(opened)
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


@store.command()
def recheck(folder: Annotated[Path, typer.Argument(metavar="STORE", help="folder of the store")]) -> None:
    """Read every record batch again: damaged ones go into quarantine, repaired ones come out of it.

    Exit code 1 when anything is in quarantine afterwards. Reads go on without what is in quarantine.
    """
    with open_store(require_store(folder), create=False) as opened:
        put, released = opened.recheck()
        left = opened.info().quarantined
    print_text(f"{folder}: {len(put)} put into quarantine, {len(released)} taken back, {len(left)} in quarantine now")
    if left:
        print_view(_damaged(left, "table"))
        raise StoreError(
            f"{folder}: {sum(one.rows for one in left)} rows cannot be read; restore the files named above from a copy "
            "and run this again"
        )


@store.command()
def recover(
    folder: Annotated[Path, typer.Argument(metavar="STORE", help="folder of the store; it is only read")],
    into: Annotated[Path, typer.Option("--into", metavar="NEW", help="new folder for the recovered store")],
) -> None:
    """Make a new store from the segments of one whose catalog is lost or damaged, and say what is missing.

    Exit code 1 when rows had to be left out or the new store is not sound. Nobody may write to STORE meanwhile.
    """
    found = recover_store(folder, into)
    names = [[name, f"{count:,}", f"{found.unvouched[name]:,}"] for name, count in sorted(found.rows.items())]
    print_view(result_table(["table", "rows", "of them not vouched for"], names, [False, True, True]))
    batches = ", ".join(f"{count} {status}" for status, count in sorted(found.batches.items())) or "none"
    print_text(f"batches: {batches}; status worked out from rows: {len(found.inferred)}")
    for line in found.lost:
        print_text(f"lost: {line}")
    for line in found.left_out:
        print_text(f"left out: {line}")
    for finding in found.findings:
        print_text(f"{finding.kind}: {finding.where}: {finding.message}")
    if found.left_out or found.findings:
        raise StoreError(
            f"{into}: {len(found.left_out)} parts were left out, {len(found.findings)} findings; see above"
        )
    print_text(f"{into}: sound")


def _damaged(frames: Sequence[QuarantinedFrame], head: str) -> RenderableType:
    cells = [[one.table, f"segments/{one.segment}@{one.offset}", f"{one.rows:,}", one.message] for one in frames]
    return result_table([head, "frame", "rows", "why"], cells, [False, False, True, False])


def _books(opened: ExperienceStore) -> list[dict[str, Any]]:
    """Lines of the view `conservation`."""
    with connect_store(opened) as inspection:
        return inspection.rows("SELECT * FROM conservation")
