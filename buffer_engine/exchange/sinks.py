"""Files that rows are written to, a part at a time, each part closed when it has reached its size."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from buffer_engine.errors import ExchangeError
from buffer_engine.exchange.plain import converter, first_not_finite

FileFormat = Literal["parquet", "jsonl"]
GROUP_BYTES = 32 << 20
GROUP_ROWS = 65_536
"""A row group is closed at whichever comes first; what is not written yet is never more than one."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A finished file: its path and how many rows it holds."""

    path: Path
    rows: int


class Sink(Protocol):
    """Takes batches of one schema."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows."""
        ...

    def close(self) -> list[WrittenFile]:
        """Finish; a relation without rows still gets one file, so that it has a schema."""
        ...


def open_sink(
    name_part: Callable[[int], Path], schema: pa.Schema, format: FileFormat, *, file_bytes: int | None
) -> Sink:
    """A sink of this format.

    Args:
        name_part: path of the part with this number.
        file_bytes: a part is closed once it has this many bytes; None: one file.
    """
    limit = 2**63 if file_bytes is None else file_bytes
    return (ParquetSink if format == "parquet" else JsonLinesSink)(name_part, schema, limit)


class ParquetSink:
    """Parquet with zstd; small batches become large row groups."""

    def __init__(self, name_part: Callable[[int], Path], schema: pa.Schema, limit: int) -> None:
        self._name_part = name_part
        self._schema = schema
        self._limit = limit
        self._done: list[WrittenFile] = []
        self._path = name_part(0)
        self._file: IO[bytes] | None = None
        self._writer: pq.ParquetWriter | None = None
        self._rows = 0
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """See `Sink.write`."""
        for at in range(0, batch.num_rows, GROUP_ROWS):
            part = batch.slice(at, GROUP_ROWS)
            self._waiting.append(part)
            self._waiting_rows += part.num_rows
            self._waiting_bytes += part.nbytes
            if self._waiting_rows >= GROUP_ROWS or self._waiting_bytes >= min(GROUP_BYTES, self._limit):
                self._flush()

    def close(self) -> list[WrittenFile]:
        """See `Sink.close`."""
        if self._waiting or not self._done:
            self._flush()
        self._finish()
        return self._done

    def _flush(self) -> None:
        writer = self._writer
        if writer is None or self._file is None:
            self._path = self._name_part(len(self._done))
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "wb")  # noqa: SIM115 - closed by _finish
            self._writer = writer = pq.ParquetWriter(self._file, self._schema, compression="zstd")
        if self._waiting:
            rows = pa.Table.from_batches(self._waiting, schema=self._schema)
            writer.write_table(rows, row_group_size=max(rows.num_rows, 1))
            self._rows += rows.num_rows
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0
        if self._file.tell() >= self._limit:
            self._finish()

    def _finish(self) -> None:
        if self._writer is None or self._file is None:
            return
        self._writer.close()
        self._file.close()
        self._done.append(WrittenFile(self._path, self._rows))
        self._writer, self._file, self._rows = None, None, 0


class JsonLinesSink:
    """UTF-8, one object a line; lists and structs stay what they are, times are ISO 8601, NaN is refused."""

    def __init__(self, name_part: Callable[[int], Path], schema: pa.Schema, limit: int) -> None:
        self._name_part = name_part
        self._limit = limit
        self._names: list[str] = schema.names
        for name in self._names:
            if self._names.count(name) > 1:
                raise ExchangeError(f"two columns are named {name!r}, which one JSON object cannot hold: rename one")
        self._converters = [converter(field.type) for field in schema]
        self._done: list[WrittenFile] = []
        self._path = name_part(0)
        self._file: IO[bytes] | None = None
        self._rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """See `Sink.write`.

        Raises:
            ExchangeError: a number is NaN or infinite, which JSON has no word for; names column and row.
        """
        for at in range(0, batch.num_rows, 1024):  # Python objects of a few rows at a time
            self._write(batch.slice(at, 1024))

    def close(self) -> list[WrittenFile]:
        """See `Sink.close`."""
        if self._file is None and not self._done:
            self._open()
        self._finish()
        return self._done

    def _write(self, batch: pa.RecordBatch) -> None:
        columns: list[list[object]] = []
        for column, convert in zip(batch.columns, self._converters, strict=True):
            values = column.to_pylist(maps_as_pydicts="strict")
            columns.append(values if convert is None else [None if one is None else convert(one) for one in values])
        for row in zip(*columns, strict=True):
            if self._file is None:
                self._open()
            values = dict(zip(self._names, row, strict=True))
            try:
                line = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            except ValueError as error:
                name, value = first_not_finite(values)
                raise ExchangeError(
                    f"{self._path.name}: row {self._rows}: column {name} is {value}, which JSON cannot say; "
                    "make it null in the query (nullif, CASE), or export Parquet"
                ) from error
            assert self._file is not None
            self._file.write(line.encode() + b"\n")
            self._rows += 1
            if self._file.tell() >= self._limit:
                self._finish()

    def _open(self) -> None:
        self._path = self._name_part(len(self._done))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "wb")  # noqa: SIM115 - closed by _finish

    def _finish(self) -> None:
        if self._file is not None:
            self._file.close()
            self._done.append(WrittenFile(self._path, self._rows))
            self._file, self._rows = None, 0
