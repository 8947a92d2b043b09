"""A whole store as one folder of Parquet, and a store out of such a folder again: same rows, keys, states, versions.

The folder is complete in itself and readable without this package. `manifest.json` names every file with its rows and
checksum; it is the last thing to be checked before a restore begins. A restored store is built beside its place and
renamed, so a crash leaves none rather than half of one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from buffer_engine.atomic_folder import atomic_folder
from buffer_engine.errors import ExchangeError, StoreVersionError, UsageError
from buffer_engine.exchange.export import FILE_BYTES, Advance
from buffer_engine.exchange.placing import new_folder
from buffer_engine.exchange.sinks import ParquetSink
from buffer_engine.schema import SCHEMA_VERSION, TABLES
from buffer_engine.store.faults import explained
from buffer_engine.store.local import LocalStore
from buffer_engine.store.media import MEDIA_FOLDER, media_path
from buffer_engine.store.opening import open_store
from buffer_engine.store.replica import STATE

KIND = "buffer-engine store"
LAYOUT_VERSION = 1
MANIFEST = "manifest.json"
_COMMITS = pa.schema([("version", pa.int64()), ("table", pa.string()), ("rows", pa.int64())])
_SPECS = "specs"
_FOLDERS = ("tables", "state", MEDIA_FOLDER, _SPECS)
_ORIGIN = "restored_from.json"


@dataclass(frozen=True, slots=True)
class BackupReceipt:
    """A whole store written or restored: its version, rows per table and attachments.

    Attributes:
        unchanged: the store was restored from this very export before, and nothing was done.
    """

    version: int
    rows: Mapping[str, int]
    media: int
    unchanged: bool = False


def back_up(
    store: LocalStore, target: Path, *, file_bytes: int = FILE_BYTES, advance: Advance = lambda rows: None
) -> BackupReceipt:
    """Write all tables, the bookkeeping, attachments and specifications of a store at one version.

    Checkpoints, weights and metrics files belong to runs and are not part of it.

    Raises:
        UsageError: the target is there already.
        ExchangeError: rows of a table are damaged and therefore missing.
        StoreError: the disk is full or read-only.
    """
    with new_folder(target) as folder, store.snapshot() as version:
        replica = store.replica()
        files: dict[str, dict[str, Any]] = {}
        rows: dict[str, int] = {}
        state = replica.bookkeeping()
        commits: list[tuple[int, str, int]] = []
        for name, spec in TABLES.items():
            sink = ParquetSink(_part_namer(folder / "tables", name), spec.schema, file_bytes)
            rows[name] = 0
            for committed, batch in replica.commits(name):
                sink.write(batch)
                commits.append((committed, name, batch.num_rows))
                rows[name] += batch.num_rows
                advance(batch.num_rows)
            for part in sink.close():
                _list_file(files, folder, part.path, rows=part.rows)
        _require_whole(store, rows["rollouts"], state["rollout_state"].num_rows)
        commits.sort(key=lambda commit: commit[0])  # stable: tables stay in the order of the schema
        columns = list(zip(*commits, strict=True)) if commits else [()] * len(_COMMITS)
        state = {**state, "commits": pa.table(dict(zip(_COMMITS.names, columns, strict=True)), schema=_COMMITS)}
        (folder / "state").mkdir()
        for name, table in state.items():
            path = folder / "state" / f"{name}.parquet"
            pq.write_table(table, path, compression="zstd")
            _list_file(files, folder, path, rows=table.num_rows)
        media = 0
        for batch in store.scan("media", columns=["media_id"]):
            for media_id in batch.column(0).to_pylist():
                path = media_path(folder / MEDIA_FOLDER, media_id)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(store.media(media_id))
                _list_file(files, folder, path)
                media += 1
        for path in sorted((store.path / _SPECS).glob("*.yaml")):
            (folder / _SPECS).mkdir(exist_ok=True)
            _list_file(files, folder, Path(shutil.copyfile(path, folder / _SPECS / path.name)))
        manifest = {
            "kind": KIND,
            "layout_version": LAYOUT_VERSION,
            "schema_version": SCHEMA_VERSION,
            "version": version,
            "written_at": datetime.now(UTC).isoformat(),
            "rows": rows,
            "files": files,
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return BackupReceipt(version, rows, media)


def is_backup(source: Path) -> bool:
    """Whether a folder looks like the export of a whole store."""
    return (source / MANIFEST).is_file()


def check_backup(source: Path, *, advance: Advance = lambda rows: None) -> dict[str, Any]:
    """The manifest of an export, every file compared with its checksum; `advance` counts files.

    Raises:
        ExchangeError: a file is missing or changed, or the manifest is none of ours.
        StoreVersionError: a newer package wrote it.
    """
    manifest = _manifest(source)
    for name, entry in manifest["files"].items():
        path = source / name
        if not path.is_file():
            raise ExchangeError(f"{path}: the file is missing, and {MANIFEST} lists it; copy the export again")
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != entry["sha256"] or (name.startswith(f"{MEDIA_FOLDER}/") and found != path.name):
            raise ExchangeError(
                f"{path}: the bytes have changed since they were exported (sha256 {found}, {entry['sha256']} in "
                f"{MANIFEST}); copy the export again"
            )
        advance(1)
    return manifest


def restore(source: Path, target: Path, *, advance: Advance = lambda rows: None) -> BackupReceipt:
    """Make a store out of the export of one; nothing is there before it is complete and durable.

    Rows, keys, statuses, uses, reservations, batches, cursors and the versions of every commit are those of the
    exported store. The layout is not: rows lie in fresh segments, and reading orders are worked out again when asked.

    Raises:
        UsageError: there is a store already that did not come from this very export.
        ExchangeError: the export is damaged; see `check_backup`.
    """
    manifest = _manifest(source)
    with open(source / MANIFEST, "rb") as file:
        origin = {"manifest_sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    media = sum(1 for name in manifest["files"] if name.startswith(f"{MEDIA_FOLDER}/"))
    version = int(manifest["version"])
    if (target / _ORIGIN).is_file() and json.loads((target / _ORIGIN).read_text()) == origin:
        return BackupReceipt(version, manifest["rows"], media, unchanged=True)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(
            f"{target}: a whole store is restored into a new place only, and something is there; name another folder, "
            f"or import single tables: --table rollouts {source / 'tables'}"
        )
    manifest = check_backup(source)
    with explained(target, "restore the store"), atomic_folder(target) as folder:
        # Durable as a whole when the folder takes its place; nobody sees it before.
        with open_store(folder, durability="process") as store:
            for name in manifest["files"]:
                if name.startswith((f"{MEDIA_FOLDER}/", f"{_SPECS}/")):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source / name, folder / name)
            state = {name: _state(source, name, schema) for name, schema in STATE.items()}
            replica = store.replica()
            replica.replay(_replayed(source, manifest, advance))
            erased = store.table("erasures", columns=["experience_id"]).column(0).to_pylist()
            replica.finish(state, version=version, erased=erased)
        (folder / _ORIGIN).write_text(json.dumps(origin) + "\n", encoding="utf-8")
    return BackupReceipt(version, manifest["rows"], media)


def _replayed(source: Path, manifest: Mapping[str, Any], advance: Advance) -> Iterator[tuple[int, dict[str, pa.Table]]]:
    """Version and rows of every commit; each table's files are read once, in order."""
    commits = _state(source, "commits", _COMMITS).to_pylist()
    with ExitStack() as opened:
        readers = {name: _RowStream(source, manifest, name, opened) for name in TABLES}
        for version, entries in groupby(commits, key=lambda commit: commit["version"]):
            tables: dict[str, list[pa.Table]] = {}
            for entry in entries:
                tables.setdefault(entry["table"], []).append(readers[entry["table"]].take(entry["rows"]))
            yield version, {name: pa.concat_tables(parts) for name, parts in tables.items()}
            advance(sum(part.num_rows for parts in tables.values() for part in parts))


class _RowStream:
    """Rows of a table's files in order, as many at a time as each commit had."""

    def __init__(self, source: Path, manifest: Mapping[str, Any], table: str, opened: ExitStack) -> None:
        self._table = table
        names = sorted(name for name in manifest["files"] if name.startswith(f"tables/{table}-"))
        self._batches = (
            batch for name in names for batch in opened.enter_context(pq.ParquetFile(source / name)).iter_batches(8192)
        )
        self._left: pa.RecordBatch | None = None

    def take(self, rows: int) -> pa.Table:
        """The next rows.

        Raises:
            ExchangeError: the files end before.
        """
        parts: list[pa.RecordBatch] = []
        while rows:
            batch = self._left if self._left is not None else next(self._batches, None)
            if batch is None:
                raise ExchangeError(f"the files of table {self._table} end {rows} rows before the listed commits do")
            parts.append(batch.slice(0, rows))
            self._left = batch.slice(rows) if batch.num_rows > rows else None
            rows -= parts[-1].num_rows
        return pa.Table.from_batches(parts, schema=None if parts else TABLES[self._table].schema)


def _manifest(source: Path) -> dict[str, Any]:
    path = source / MANIFEST
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExchangeError(f"{path}: cannot be read as the manifest of an export ({error})") from error
    if not isinstance(found, dict) or cast("dict[str, Any]", found).get("kind") != KIND:
        raise ExchangeError(f"{path}: not the manifest of an exported store; name the folder that `store export` wrote")
    manifest = cast("dict[str, Any]", found)
    for name in manifest["files"]:
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts or place.parts[0] not in _FOLDERS:
            raise ExchangeError(f"{path}: lists {name!r}, which no export has; nothing was read")
    if manifest["schema_version"] > SCHEMA_VERSION or manifest["layout_version"] > LAYOUT_VERSION:
        raise StoreVersionError(
            f"{path}: exported from schema version {manifest['schema_version']}, this package reads up to "
            f"{SCHEMA_VERSION}; install a newer buffer-engine"
        )
    return manifest


def _state(source: Path, name: str, schema: pa.Schema) -> pa.Table:
    return pq.read_table(source / "state" / f"{name}.parquet", schema=schema)


def _part_namer(folder: Path, name: str) -> Any:
    return lambda part: folder / f"{name}-{part:05d}.parquet"


def _list_file(files: dict[str, dict[str, Any]], folder: Path, path: Path, *, rows: int | None = None) -> None:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    entry: dict[str, Any] = {"bytes": path.stat().st_size, "sha256": digest}
    files[path.relative_to(folder).as_posix()] = entry if rows is None else entry | {"rows": rows}


def _require_whole(store: LocalStore, read: int, listed: int) -> None:
    if read != listed:
        raise ExchangeError(
            f"{store.path}: {listed} rollouts are listed and {read} can be read, so a whole copy is not possible; "
            "`store verify` says which are damaged; export the readable ones with --table rollouts"
        )
