"""Selections written as files: one file, or a folder of parts; attachments go with the messages that refer to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.errors import UsageError
from buffer_engine.exchange.card import dataset_card, refuse_maps
from buffer_engine.exchange.placing import new_file, new_folder
from buffer_engine.exchange.relations import Extraction, Relation, Selection
from buffer_engine.exchange.shapes import Shape, ShapeReport, open_shape
from buffer_engine.exchange.sinks import FileFormat, Sink, WrittenFile, open_sink
from buffer_engine.schema import MEDIA, MESSAGE
from buffer_engine.store.media import MEDIA_FOLDER, media_path, references

ExportFormat = Literal["parquet", "jsonl", "hf"]
FILE_BYTES = 512 << 20
Advance = Callable[[int], None]
"""Called with the number of rows that were written."""


@dataclass(frozen=True, slots=True)
class ExportReceipt:
    """What an export wrote.

    Attributes:
        version: catalog version that was exported.
        rows: rows of each relation.
        files: how many files hold rows.
        media: attachments written beside them.
        left_behind: attachments that rows refer to and that were not written: there is only one file, or the shape has
            no place for them.
        passed_over: of shapes, reason → rows or groups that gave nothing.
    """

    version: int
    rows: Mapping[str, int]
    files: int
    media: int = 0
    left_behind: int = 0
    passed_over: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(slots=True)
class _Progress:
    advance: Advance
    rows: dict[str, int] = field(default_factory=dict[str, int])
    files: int = 0
    wanted: set[str] = field(default_factory=set[str])
    shaped: ShapeReport = field(default_factory=ShapeReport)


def export(
    extraction: Extraction,
    target: Path,
    selections: Sequence[Selection | Shape],
    *,
    format: ExportFormat,
    file_bytes: int = FILE_BYTES,
    advance: Advance = lambda rows: None,
) -> ExportReceipt:
    """Write selections of a store, read at one version and a batch at a time.

    Args:
        target: with one selection and a name that ends like the format (`rows.parquet`, `rows.jsonl`) one file, else
            a folder with files `<name>-00000.parquet`; `hf` is always a folder that `datasets.load_dataset` opens.
        file_bytes: a file of a folder is closed once it has this many bytes.
    Raises:
        UsageError: the target is there already, or the selections do not fit it.
        ExchangeError: a value cannot be written in this format.
        StoreError: the disk is full or read-only, or the store is damaged.
    """
    if not selections:
        raise UsageError("nothing to export: name a table, a view or a query")
    names = [selection.name for selection in selections]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"{twice[0]!r} is to be exported twice; name it once")
    progress = _Progress(advance)
    if format != "hf" and target.suffix == f".{format}":
        if len(selections) > 1:
            raise UsageError(f"{target}: {len(selections)} relations do not fit one file; name a folder")
        with new_file(target) as draft, _opened(extraction, selections[0], progress) as relation:
            sink = open_sink(lambda part: draft, relation.schema, format, file_bytes=None)
            _write(relation, {None: sink}, selections[0].name, progress)
        return _receipt(extraction, progress, media=0)
    with new_folder(target) as folder:
        parts: dict[str, dict[str, list[WrittenFile]]] = {}
        for selection in selections:
            parts[selection.name] = _export_one(extraction, folder, selection, format, file_bytes, progress)
        media = 0
        if progress.wanted:
            listing = _export_media(extraction, folder, progress, format=format, listed="media" in parts)
            media = len(progress.wanted)
            parts |= listing
        if format == "hf":
            card = dataset_card(extraction.store.path.name, extraction.version, parts, folder)
            (folder / "README.md").write_text(card, encoding="utf-8")
    return _receipt(extraction, progress, media=media)


def _opened(
    extraction: Extraction, selection: Selection | Shape, progress: _Progress
) -> AbstractContextManager[Relation]:
    if isinstance(selection, Shape):
        return open_shape(extraction, selection, progress.shaped)
    return extraction.open(selection)


def _receipt(extraction: Extraction, progress: _Progress, *, media: int) -> ExportReceipt:
    return ExportReceipt(
        extraction.version,
        progress.rows,
        progress.files,
        media=media,
        left_behind=len(progress.wanted) - media + len(progress.shaped.media),
        passed_over=dict(progress.shaped.passed_over),
    )


def _export_one(
    extraction: Extraction,
    folder: Path,
    selection: Selection | Shape,
    format: ExportFormat,
    file_bytes: int,
    progress: _Progress,
) -> dict[str, list[WrittenFile]]:
    """Write one selection; its files by split."""
    with _opened(extraction, selection, progress) as relation:
        if format == "hf":
            refuse_maps(selection.name, relation.schema)
        sinks = _sinks(folder, selection.name, relation.schema, format, file_bytes)
        written = _write(relation, sinks, selection.name, progress)
    return {split or "train": files for split, files in written.items()}


def _sinks(folder: Path, name: str, schema: pa.Schema, format: ExportFormat, file_bytes: int) -> dict[str | None, Sink]:
    """One sink; of a Hugging Face folder one per partition, so that nobody trains on evaluation rows unawares."""
    if format != "hf":
        return {None: open_sink(_parts(folder, name, format), schema, format, file_bytes=file_bytes)}
    splits = ("train", "eval") if "partition" in schema.names else ("train",)
    return {
        split: open_sink(_parts(folder / "data" / name, split, "parquet"), schema, "parquet", file_bytes=file_bytes)
        for split in splits
    }


def _parts(folder: Path, name: str, format: FileFormat) -> Callable[[int], Path]:
    return lambda part: folder / f"{name}-{part:05d}.{format}"


def _write(
    relation: Relation, sinks: Mapping[str | None, Sink], name: str, progress: _Progress
) -> dict[str | None, list[WrittenFile]]:
    rows = 0
    messages = _messages_column(relation.schema)
    listing = name == "media" and "media_id" in relation.schema.names
    for batch in relation.batches:
        if messages is not None:
            progress.wanted |= references(batch.column(messages))
        if listing:  # the table goes with the bytes that it lists
            progress.wanted.update(batch.column("media_id").to_pylist())
        for split, sink in sinks.items():
            sink.write(batch if len(sinks) == 1 else _of_partition(batch, split))
        rows += batch.num_rows
        progress.advance(batch.num_rows)
    progress.rows[name] = rows
    written = {split: sink.close() for split, sink in sinks.items()}
    if len(written) > 1:  # a split without rows is left out, unless there is no other
        for split in [split for split, files in written.items() if not sum(file.rows for file in files)]:
            if len(written) > 1:
                for file in written.pop(split):
                    file.path.unlink()
    progress.files += sum(len(files) for files in written.values())
    return written


def _of_partition(batch: pa.RecordBatch, split: str | None) -> pa.RecordBatch:
    return batch.filter(pc.equal(batch.column("partition"), split))


def _messages_column(schema: pa.Schema) -> int | None:
    """Place of the column whose messages may refer to attachments."""
    at = schema.get_field_index("messages")
    return at if at >= 0 and schema.field(at).type.equals(pa.list_(MESSAGE)) else None


def _export_media(
    extraction: Extraction, folder: Path, progress: _Progress, *, format: ExportFormat, listed: bool
) -> dict[str, dict[str, list[WrittenFile]]]:
    """Copy the attachments that were referred to and list them, unless the table is exported anyway."""
    for media_id in sorted(progress.wanted):
        write_media(extraction, media_id, folder)
    if listed:
        return {}
    ids = pa.array(sorted(progress.wanted))
    listing = extraction.store.table("media", until=extraction.version)
    rows = listing.filter(pc.is_in(listing.column("media_id"), value_set=ids))
    sinks = _sinks(folder, "media", MEDIA.schema, format, FILE_BYTES)
    written = _write(Relation(MEDIA.schema, iter(rows.to_batches())), sinks, "media", progress)
    return {"media": {split or "train": files for split, files in written.items()}}


def write_media(extraction: Extraction, media_id: str, folder: Path) -> None:
    """Write an attachment, checked against its hash, below `folder`/media.

    Raises:
        StoreError: the store has not got it, or other bytes under its name.
    """
    data = extraction.store.media(media_id)
    path = media_path(folder / MEDIA_FOLDER, media_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
