"""A finished Parquet file of one table: what merged frames are written to.

Any Parquet reader opens it. Row groups are sized so that one can be decoded for a single row; pages carry checksums
and an index. The file says in its metadata (`buffer_engine.frames`) which frames it holds, and the catalog has an XXH3
of every column of every row group and of the tail, so damage is found where it is, and hurts nothing beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from buffer_engine.schema import TableSpec
from buffer_engine.store.segments import frame_checksum

ROW_GROUP_BYTES = 16 << 20
"""Arrow bytes of a row group: reading one row decodes one of these."""
ROW_GROUP_ROWS = 65_536
FRAMES_KEY = "buffer_engine.frames"
_LEVEL = 3  # zstd level 6 takes twice the processor time for 1.5 % fewer bytes


@dataclass(frozen=True, slots=True)
class Chunk:
    """One column of one row group: which rows of the file it has, and where its bytes lie.

    Attributes:
        number: row group times columns of the file plus column.
        first: first row of the row group within the file.
    """

    number: int
    first: int
    rows: int
    offset: int
    length: int
    xxh3: int


@dataclass(frozen=True, slots=True)
class Label:
    """What a file says about a frame that it holds: enough to put it back into a catalog that was lost."""

    frame_id: int
    version: int
    rows: int
    xxh3: int


@dataclass(frozen=True, slots=True)
class ParquetFile:
    """What the catalog has to know about a written file: its chunks, and length and checksum of its tail."""

    rows: int
    bytes: int
    chunks: tuple[Chunk, ...]
    head: int
    head_xxh3: int


def write_parquet(path: Path, spec: TableSpec, frames: Iterable[tuple[Label, pa.RecordBatch]]) -> ParquetFile:
    """Write frames, in the order given, to a new file.

    Raises:
        OSError: the disk is full or failing; the half file is left to whoever sweeps.
    """
    labels: list[Label] = []
    with pq.ParquetWriter(
        path,
        spec.schema,
        compression="zstd",
        compression_level=_LEVEL,
        write_page_index=True,
        write_page_checksum=True,
        use_dictionary=[leaf for leaf, kind in _leaves(spec.schema) if not pt.is_floating(kind)],
        column_encoding={leaf: "BYTE_STREAM_SPLIT" for leaf, kind in _leaves(spec.schema) if pt.is_floating(kind)},
    ) as writer:
        for group in _row_groups(_noting(frames, labels)):
            rows = pa.Table.from_batches(group, schema=spec.schema)
            writer.write_table(rows, row_group_size=rows.num_rows)
        said = [[label.frame_id, label.version, label.rows, label.xxh3] for label in labels]
        writer.add_key_value_metadata({FRAMES_KEY: json.dumps(said, separators=(",", ":"))})
    with pa.memory_map(str(path), "r") as file:
        return measure(file.read_buffer(file.size()))


def measure(data: pa.Buffer) -> ParquetFile:
    """Chunks, tail and checksums of a whole Parquet file; chunks and tail together are all of its bytes."""
    metadata = pq.read_metadata(pa.BufferReader(data))
    starts, tail = _starts(metadata)
    bounds = [0, *starts[1:], tail]
    columns = _top_level(metadata)
    chunks: list[Chunk] = []
    first = 0
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        for column in range(len(columns)):
            number = group * len(columns) + column
            offset, length = bounds[number], bounds[number + 1] - bounds[number]
            chunks.append(
                Chunk(number, first, rows, offset, length, frame_checksum(memoryview(data.slice(offset, length))))
            )
        first += rows
    head = data.size - tail
    return ParquetFile(first, data.size, tuple(chunks), head, frame_checksum(memoryview(data.slice(tail, head))))


def labels_of(metadata: pq.FileMetaData) -> list[Label]:
    """The frames that a file says it holds, in file order; none when another program made it."""
    said = (metadata.metadata or {}).get(FRAMES_KEY.encode())
    return [] if said is None else [Label(*one) for one in json.loads(said)]


def _noting(frames: Iterable[tuple[Label, pa.RecordBatch]], labels: list[Label]) -> Iterator[pa.RecordBatch]:
    for label, batch in frames:
        labels.append(label)
        yield batch


def _row_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Batches gathered into row groups; one that is far larger than a row group is cut."""
    group: list[pa.RecordBatch] = []
    weight = rows = 0
    for batch in batches:
        for part in _parts(batch):
            group.append(part)
            weight += part.nbytes
            rows += part.num_rows
            if weight >= ROW_GROUP_BYTES or rows >= ROW_GROUP_ROWS:
                yield group
                group, weight, rows = [], 0, 0
    if group:
        yield group


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.nbytes <= 2 * ROW_GROUP_BYTES and batch.num_rows <= ROW_GROUP_ROWS:
        yield batch
        return
    step = min(max(1, batch.num_rows * ROW_GROUP_BYTES // max(batch.nbytes, 1)), ROW_GROUP_ROWS)
    for start in range(0, batch.num_rows, step):
        yield batch.slice(start, step)


def _starts(metadata: pq.FileMetaData) -> tuple[list[int], int]:
    """Where each chunk begins, in order, and where the last one ends."""
    starts: list[int] = []
    end = 4  # a file without rows: the tail begins after the magic bytes
    for group in range(metadata.num_row_groups):
        described = metadata.row_group(group)
        seen = ""
        for leaf in range(described.num_columns):
            column = described.column(leaf)
            begin = column.data_page_offset
            if column.dictionary_page_offset is not None:
                begin = min(begin, column.dictionary_page_offset)
            top = column.path_in_schema.split(".", 1)[0]
            if leaf == 0 or top != seen:
                starts.append(begin)
                seen = top
            end = begin + column.total_compressed_size
    return starts, end


def _top_level(metadata: pq.FileMetaData) -> list[str]:
    """Names of the columns, nested ones once, in file order."""
    paths = [metadata.schema.column(leaf).path.split(".", 1)[0] for leaf in range(metadata.num_columns)]
    return list(dict.fromkeys(paths))


def _leaves(fields: Iterable[pa.Field], prefix: str = "") -> list[tuple[str, pa.DataType]]:
    """Path of every leaf column as Parquet names it, with its type."""
    found: list[tuple[str, pa.DataType]] = []
    for field in fields:
        path = f"{prefix}{field.name}"
        kind: pa.DataType = field.type
        while pt.is_list(kind):
            path, kind = f"{path}.list.element", kind.value_type
        if pt.is_struct(kind):
            inner: Sequence[pa.Field] = [kind.field(at) for at in range(kind.num_fields)]
            found += _leaves(inner, f"{path}.")
        else:
            found.append((path, kind))
    return found
