"""`buffer-engine store export` and `store import`: rows out of a store and into one."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import typer

from buffer_engine.errors import UsageError, did_you_mean
from buffer_engine.exchange.backup import BackupReceipt, back_up, check_backup, is_backup, restore
from buffer_engine.exchange.export import ExportFormat, ExportReceipt, export
from buffer_engine.exchange.incoming import Importer, ImportReceipt, OnInvalid
from buffer_engine.exchange.relations import Extraction, Selection, every_table
from buffer_engine.exchange.shapes import Shape, ShapeName
from buffer_engine.exchange.sources import find_files
from buffer_engine.exchange.trinity import import_trinity
from buffer_engine.schema import TABLES
from buffer_engine.store.base import Partition
from buffer_engine.store.local import LocalStore
from buffer_engine.store.opening import open_store
from pipelines.cli.console import logs, print_text
from pipelines.cli.opening import require_store
from pipelines.progress import Progress

ImportFormat = Literal["parquet", "jsonl", "hf", "store", "trinity"]
_SAID = {
    "no_reply": "rows that do not end with a reply",
    "no_difference": "groups without two rewards far enough apart",
    "prompts_differ": "pairs whose prompts differ",
    "same_text": "pairs of equal texts",
    "several_rows_an_episode": "episodes of several rows",
}


def register(store: typer.Typer) -> None:
    """Add the verbs to `buffer-engine store`."""
    store.command(name="export")(export_store)
    store.command(name="import")(import_into)


def export_store(
    folder: Annotated[Path, typer.Argument(metavar="STORE", help="folder of the store")],
    target: Annotated[
        Path, typer.Argument(metavar="DEST", help="new folder, or for one relation a file NAME.parquet or NAME.jsonl")
    ],
    format_name: Annotated[
        str | None, typer.Option("--format", help="parquet | jsonl | hf (Hugging Face datasets) [default: by DEST]")
    ] = None,
    tables: Annotated[list[str] | None, typer.Option("--table", help="a table; may be repeated")] = None,
    view_names: Annotated[list[str] | None, typer.Option("--view", help="a view; may be repeated")] = None,
    sql: Annotated[str | None, typer.Option("--sql", help="rows of this SELECT")] = None,
    name: Annotated[str, typer.Option("--name", help="what the rows of --sql are called")] = "query",
    shape: Annotated[
        str | None, typer.Option("--shape", help="sft | prompt_completion | preference: dialogues as TRL reads them")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            help="SQL condition; for table rollouts and shapes about columns of the view experiences, "
            "such as \"reward = 1 AND run_id = 'a'\" [default of shapes: status = 'kept']",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option("--columns", help="only these columns, comma between; of shapes: columns to carry along"),
    ] = None,
    until: Annotated[int | None, typer.Option("--as-of", min=0, help="as of this version of the store")] = None,
    partition: Annotated[str, typer.Option("--partition", help="shapes: train | eval")] = "train",
    margin: Annotated[
        float, typer.Option("--margin", min=0, help="preference: least difference of rewards; 0: any difference")
    ] = 0.0,
    pairs: Annotated[
        int, typer.Option("--pairs-per-group", min=0, help="preference: those furthest apart first; 0: all")
    ] = 1,
    file_mb: Annotated[int, typer.Option("--file-mb", min=1, help="begin another file at this size, in MiB")] = 512,
) -> None:
    """Write rows of a store to files: tables, views, a query, training data, or with none of these the whole store.

    Everything is of one version. DEST appears when it is complete; nothing is overwritten. A whole store in Parquet
    can be restored by `store import`, exactly.
    """
    require_store(folder)
    kind = _format(format_name, target)
    chosen = tuple(name.strip() for name in columns.split(",")) if columns else None
    selections = _selections(tables or (), view_names or (), sql, name, shape, where, chosen)
    progress = Progress(logs)
    with open_store(folder, read_only=True) as store:
        if not selections and shape is None and kind == "parquet":
            if where or columns or until is not None:
                raise UsageError("a whole store is written as it is; for --where, --columns or --as-of name a --table")
            total = sum(store.info().rows.values())
            with progress.phase(f"exporting {folder}", total=total) as advance:
                whole = back_up(store, target, file_bytes=file_mb << 20, advance=advance)
            _print_whole(f"{target}: written", whole)
            return
        if shape is not None:
            if shape not in get_args(ShapeName):
                raise UsageError(f"--shape {shape!r}: {did_you_mean(shape, get_args(ShapeName))}")
            if partition not in get_args(Partition):
                raise UsageError(f"--partition {partition!r}: {did_you_mean(partition, get_args(Partition))}")
            shaped = Shape(cast("ShapeName", shape), where, cast("Partition", partition), chosen or (), margin, pairs)
            everything: list[Selection | Shape] = [*selections, shaped]
        else:
            everything = [*(selections or every_table())]
        with Extraction(store, until=until) as extraction:
            with progress.phase(f"exporting {folder}", total=_total(store, everything, until)) as advance:
                done = export(extraction, target, everything, format=kind, file_bytes=file_mb << 20, advance=advance)
    _print_export(target, done)


def import_into(
    folder: Annotated[Path, typer.Argument(metavar="STORE", help="folder of the store; made when there is none")],
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="file or folder to take rows from")],
    format_name: Annotated[
        str | None,
        typer.Option(
            "--format", help="parquet | jsonl | hf | store | trinity (SQLite of Trinity-RFT) [default: by SOURCE]"
        ),
    ] = None,
    tables: Annotated[
        list[str] | None,
        typer.Option("--table", help="only this table, may be repeated; one: also what files hold that do not say it"),
    ] = None,
    on_invalid: Annotated[
        str, typer.Option("--on-invalid", help="a bad row: refuse (nothing is stored) or skip (counted in events)")
    ] = "refuse",
    run: Annotated[
        str, typer.Option("--run", help="trinity: run that the rows become part of; else of events about skipped rows")
    ] = "import",
    taskset: Annotated[str, typer.Option("--taskset", help="trinity: task set of the tasks made")] = "trinity",
    partition: Annotated[str, typer.Option("--partition", help="trinity: train | eval")] = "train",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check every row and store nothing")] = False,
) -> None:
    """Take rows into a store. The same source again changes nothing.

    SOURCE is what `store export` writes, or the like from elsewhere with our columns. The export of a whole store
    becomes a store again, in a new folder. Dialogues that still have to be tokenised come in by `imports:` of a run's
    specification instead.
    """
    if on_invalid not in get_args(OnInvalid):
        raise UsageError(f"--on-invalid {on_invalid!r}: {did_you_mean(on_invalid, get_args(OnInvalid))}")
    kind = _import_format(format_name, source, tables)
    progress = Progress(logs)
    if kind == "store":
        _restore(folder, source, progress, dry_run=dry_run)
        return
    if partition not in get_args(Partition):
        raise UsageError(f"--partition {partition!r}: {did_you_mean(partition, get_args(Partition))}")
    if kind == "trinity":
        if tables is not None and len(tables) > 1:
            raise UsageError("one table of Trinity-RFT at a time: give --table once")
        with progress.phase(f"importing {source}", total=None) as advance, _opened(folder, dry_run) as store:
            importer = Importer(
                store, on_invalid=cast("OnInvalid", on_invalid), run_id=run, dry_run=dry_run, advance=advance
            )
            name = tables[0] if tables else None
            receipt, notes = import_trinity(
                importer,
                source,
                table=name,
                run_id=run,
                taskset=taskset,
                partition=cast("Partition", partition),
            )
    else:
        files = find_files(source, format=kind, tables=tables or ())
        rows = [file.rows() for file in files]
        total = None if None in rows else sum(number for number in rows if number is not None)
        with progress.phase(f"importing {source}", total=total) as advance, _opened(folder, dry_run) as store:
            importer = Importer(
                store, on_invalid=cast("OnInvalid", on_invalid), run_id=run, dry_run=dry_run, advance=advance
            )
            receipt = importer.take_files(files, root=source if source.is_dir() else source.parent)
        notes = []
    _print_import(folder, receipt, notes, dry_run=dry_run)


@contextmanager
def _opened(folder: Path, dry_run: bool) -> Generator[LocalStore]:
    """The store to import into; nothing is written for a dry run, and where there is none an empty one stands in."""
    if not dry_run:
        with open_store(folder) as store:
            yield store
    elif folder.exists():
        with open_store(require_store(folder), read_only=True) as store:
            yield store
    else:
        with tempfile.TemporaryDirectory() as scratch, open_store(scratch) as store:
            yield store


def _selections(
    tables: list[str] | tuple[()],
    view_names: list[str] | tuple[()],
    sql: str | None,
    name: str,
    shape: str | None,
    where: str | None,
    columns: tuple[str, ...] | None,
) -> list[Selection]:
    for table in tables:
        if table not in TABLES:
            raise UsageError(f"there is no table {table!r}: {did_you_mean(table, TABLES)}")
    found = [Selection(table, "table", where=where, columns=columns) for table in tables]
    found += [Selection(view, "view", where=where, columns=columns) for view in view_names]
    if sql is not None:
        found.append(Selection(name, "query", query=sql.rstrip().rstrip(";"), where=where, columns=columns))
    if len(found) > 1 and (where is not None or columns is not None):
        raise UsageError("--where and --columns are about one table, view or query; export the others by themselves")
    if shape is not None and found:
        raise UsageError("a shape is exported by itself; leave out --table, --view and --sql")
    return found


def _total(store: LocalStore, selections: Sequence[Selection | Shape], until: int | None) -> int | None:
    """How many rows will come; None when only reading them tells."""
    stored = store.info().rows
    whole = [one.name for one in selections if isinstance(one, Selection) and one.kind == "table" and one.where is None]
    if until is not None or len(whole) < len(selections):
        return None
    return sum(stored.get(name, 0) for name in whole)


def _format(given: str | None, target: Path) -> ExportFormat:
    known = get_args(ExportFormat)
    if given is None:
        suffix = target.suffix.lstrip(".")
        return cast("ExportFormat", suffix) if suffix in known else "parquet"
    if given not in known:
        raise UsageError(f"--format {given!r}: {did_you_mean(given, known)}")
    return cast("ExportFormat", given)


def _import_format(given: str | None, source: Path, tables: list[str] | None) -> ImportFormat | None:
    known = get_args(ImportFormat)
    if given is not None and given not in known:
        raise UsageError(f"--format {given!r}: {did_you_mean(given, known)}")
    if given == "store" or (given is None and not tables and is_backup(source)):
        return "store"
    if given is None and source.suffix in (".db", ".sqlite", ".sqlite3"):
        return "trinity"
    return cast("ImportFormat | None", given)


def _restore(folder: Path, source: Path, progress: Progress, *, dry_run: bool) -> None:
    if dry_run:
        with progress.phase(f"checking {source}", total=None) as advance:
            manifest = check_backup(source, advance=advance)
        whole = BackupReceipt(manifest["version"], manifest["rows"], 0)
        _print_whole(f"{source}: every file is as it was exported; nothing was stored", whole)
        return
    with progress.phase(f"restoring {folder}", total=None) as advance:
        done = restore(source, folder, advance=advance)
    _print_whole(f"{folder}: {'restored from this export before' if done.unchanged else 'restored'}", done)


def _print_whole(said: str, receipt: BackupReceipt) -> None:
    media = f", {_count(receipt.media, 'attachment')}" if receipt.media else ""
    print_text(f"{said}: {_count(sum(receipt.rows.values()), 'row')}{media}, version {receipt.version}")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _print_export(target: Path, receipt: ExportReceipt) -> None:
    rows = ", ".join(f"{_count(count, 'row')} of {name}" for name, count in receipt.rows.items())
    media = f", {_count(receipt.media, 'attachment')}" if receipt.media else ""
    print_text(f"{target}: {rows}{media} in {_count(receipt.files, 'file')}; version {receipt.version}")
    for reason, count in receipt.passed_over.items():
        logs.print(f"passed over: {count:,} {_SAID[reason]}", style="dim", markup=False)
    if receipt.left_behind:
        logs.print(
            f"{receipt.left_behind:,} attachments that these rows refer to are not in the export; a folder of the "
            "table rollouts carries them",
            style="dim",
            markup=False,
        )


def _print_import(folder: Path, receipt: ImportReceipt, notes: list[str], *, dry_run: bool) -> None:
    for table in dict.fromkeys([*receipt.added, *receipt.unchanged, *receipt.skipped]):
        added, unchanged = receipt.added.get(table, 0), receipt.unchanged.get(table, 0)
        skipped = receipt.skipped.get(table, 0)
        tail = f", {skipped:,} skipped" if skipped else ""
        if dry_run:
            print_text(f"{folder}: {table}: {_count(added + unchanged, 'sound row')}{tail}; nothing was stored")
        else:
            print_text(f"{folder}: {table}: {_count(added, 'row')} added, {unchanged:,} already there{tail}")
    for line in [*receipt.reasons, *notes]:
        logs.print(line, style="dim", markup=False, soft_wrap=True)
