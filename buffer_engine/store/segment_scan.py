"""Record batches found in segment files without asking the catalog, which is lost or damaged.

A segment is an Arrow stream, so its messages follow one another and say how long they are. Where bytes are damaged,
the search goes on at the next place that reads as a record batch. The stream carries no checksum: a batch that no
surviving catalog entry vouches for is only known to be well formed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from buffer_engine.errors import SchemaError
from buffer_engine.schema import TABLES, TableSpec
from buffer_engine.store.reading import present
from buffer_engine.store.segments import frame_checksum
from buffer_engine.store.validate import conform

_MARK = b"\xff\xff\xff\xff"
_VOLATILE_NAMES = ("created_at", "scored_at", "decided_at", "recorded_at", "erased_at")


@dataclass(frozen=True, slots=True)
class Listing:
    """What the old catalog said about a record batch."""

    frame_id: int
    version: int
    length: int
    rows: int
    xxh3: int


@dataclass(frozen=True, slots=True)
class FoundFrame:
    """A readable record batch.

    Attributes:
        listing: what vouches for it; None: nobody does, so it may never have been acknowledged.
        newest: largest time in it, kept from going backwards within a file; None: the table has no time.
    """

    table: str
    segment: str
    offset: int
    batch: pa.RecordBatch
    listing: Listing | None
    newest: datetime | None


@dataclass(frozen=True, slots=True)
class DamagedPart:
    """Bytes of a segment in which a record batch was, or may have been."""

    segment: str
    offset: int
    message: str


def scan_segment(path: Path, segment: str, listed: Mapping[int, Listing]) -> Iterator[FoundFrame | DamagedPart]:
    """Everything in one segment file, in order.

    Args:
        segment: `<table>/<file>`, as the catalog calls it.
        listed: by offset, the batches that the old catalog had in this file.
    """
    spec = TABLES.get(segment.split("/")[0])
    if spec is None:
        yield DamagedPart(segment, 0, f"no table is called {segment.split('/')[0]!r}")
    elif path.suffix == ".parquet":
        yield from _in_order(_parquet(path, segment, spec))
    else:
        yield from _in_order(_stream(path, segment, spec, listed))


def _stream(
    path: Path, segment: str, spec: TableSpec, listed: Mapping[int, Listing]
) -> Iterator[FoundFrame | DamagedPart]:
    if path.stat().st_size == 0:
        return  # a writer was killed between making the file and writing to it
    data = pa.memory_map(str(path), "r").read_buffer()
    schema, at = _schema(data, spec)
    if schema is None:
        yield DamagedPart(segment, 0, "the schema at its start is damaged; the table's present schema is tried")
        schema = spec.schema
    places = sorted(offset for offset in listed if offset >= at)
    while at < data.size:
        listing = listed.get(at)
        batch, end = _batch(data, at, schema, spec)
        if listing is not None:
            end = at + listing.length
            if batch is None or frame_checksum(memoryview(data.slice(at, listing.length))) != listing.xxh3:
                yield DamagedPart(segment, at, f"{listing.rows} rows whose bytes have changed since they were written")
            else:
                yield FoundFrame(spec.name, segment, at, batch, listing, _newest(batch))
            at = end
            continue
        if batch is not None:
            yield FoundFrame(spec.name, segment, at, batch, None, _newest(batch))
            at = end
            continue
        ends = bytes(data.slice(at, 4)) == bytes(4)
        following = next((place for place in places if place > at), None)
        found = following if ends else _resume(data, at + 8, following, schema, spec)
        if found is None:
            if not ends:
                yield DamagedPart(segment, at, "no record batch follows: a write that was cut short, or damage")
            return
        if not ends or found != at:
            yield DamagedPart(segment, at, f"{found - at} bytes that are no record batch")
        at = found


def _schema(data: pa.Buffer, spec: TableSpec) -> tuple[pa.Schema | None, int]:
    """The schema message and where it ends; without it the search begins at 0."""
    try:
        schema = pa.ipc.read_schema(data)
        (length,) = struct.unpack_from("<i", memoryview(data), 4)
    except (pa.ArrowInvalid, OSError, EOFError, struct.error):
        return None, 0
    known = set(spec.schema.names)
    return (schema, 8 + length) if set(schema.names) <= known else (None, 0)


def _batch(data: pa.Buffer, at: int, schema: pa.Schema, spec: TableSpec) -> tuple[pa.RecordBatch | None, int]:
    """The valid record batch at a place and where it ends; None when there is none."""
    if data.size - at < 16 or bytes(data.slice(at, 4)) != _MARK:
        return None, at
    try:
        message = pa.ipc.read_message(data.slice(at))
        (metadata,) = struct.unpack_from("<i", memoryview(data), at + 4)
        if message.type != "record batch":
            return None, at
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=True)
        batch = present(batch, spec)
        conform(spec, pa.Table.from_batches([batch]))
    except (pa.ArrowException, SchemaError, OSError, EOFError, ValueError):
        return None, at
    return batch, at + 8 + metadata + (0 if message.body is None else message.body.size)


def _resume(data: pa.Buffer, start: int, following: int | None, schema: pa.Schema, spec: TableSpec) -> int | None:
    """Where the next record batch begins: messages are aligned to 8 bytes."""
    view = memoryview(data)
    stop = data.size if following is None else following
    chunk = 1 << 20
    for base in range(start, stop, chunk):
        part = bytes(view[base : min(base + chunk + 4, stop)])
        place = part.find(_MARK)
        while place != -1:
            at = base + place
            if at % 8 == 0 and _batch(data, at, schema, spec)[0] is not None:
                return at
            place = part.find(_MARK, place + 1)
    return following


def _parquet(path: Path, segment: str, spec: TableSpec) -> Iterator[FoundFrame | DamagedPart]:
    """Frames of a compacted file, which lists them in its metadata; only acknowledged ones are ever compacted."""
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        given = json.loads((file.schema_arrow.metadata or {}).get(b"buffer_engine.frames", b"[]"))
        # the file's rows are those of its frames, one after another
        frames = [Listing(frame_id, version, rows, rows, xxh3) for frame_id, version, rows, xxh3 in given]
        rows = file.read().select(spec.schema.names).cast(spec.schema).combine_chunks()
        conform(spec, rows)
    except (pa.ArrowException, SchemaError, OSError, KeyError, ValueError, TypeError) as error:
        yield DamagedPart(segment, 0, " ".join(str(error).split()))
        return
    at = 0
    for listing in frames:
        for batch in rows.slice(at, listing.rows).to_batches():
            yield FoundFrame(spec.name, segment, at, batch, listing, _newest(batch))
        at += listing.rows
    if at != rows.num_rows:
        yield DamagedPart(segment, at, f"{rows.num_rows - at} rows that no frame of the file's own list covers")


def _newest(batch: pa.RecordBatch) -> datetime | None:
    for name in _VOLATILE_NAMES:
        if name in batch.schema.names and pt.is_timestamp(batch.schema.field(name).type):
            return pc.max(batch.column(name)).as_py()
    return None


def _in_order(found: Iterator[FoundFrame | DamagedPart]) -> Iterator[FoundFrame | DamagedPart]:
    """The same with times that never go backwards: what lies later in a file was written later."""
    newest: datetime | None = None
    for one in found:
        if isinstance(one, DamagedPart) or one.newest is None:
            yield one
            continue
        newest = one.newest if newest is None else max(newest, one.newest)
        yield replace(one, newest=newest)
