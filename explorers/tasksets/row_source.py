"""Rows of a JSONL or Parquet file with their position, and the types of their columns from the head alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from buffer_engine.errors import TasksetError

Row = tuple[str, Mapping[str, Any]]
"""Where a row is (`file:line` or `file row n`) and its values."""

HEAD_ROWS = 200
"""Rows looked at to learn a JSONL file's columns."""


def read_jsonl(path: Path) -> Iterator[Row]:
    """One row per line; blank lines are passed over.

    Raises:
        TasksetError: no such file, it cannot be read, or a line is not a JSON object; names file and line.
    """
    return ((where, parse_object(line, where)) for where, line in read_lines(path))


def read_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Lines that are not blank, unparsed, with `file:line`.

    Raises:
        TasksetError: no such file, or it cannot be read.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}:{number}", line
    except OSError as error:
        raise TasksetError(f"{path} cannot be read: {error.strerror or error} → check the path") from error


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(line: bytes, where: str) -> Mapping[str, Any]:
    """The JSON object of one line.

    Raises:
        TasksetError: it is not one; names `where`.
    """
    try:
        value = json.loads(line)
    except ValueError as error:
        raise TasksetError(f"{where}: not JSON ({error}) → each line must be one JSON object") from error
    except RecursionError as error:
        raise TasksetError(f"{where}: nested too deeply to be read → flatten the object") from error
    # Half of a surrogate pair is legal in JSON, but it is no text: it can be neither stored nor tokenised.
    if _SURROGATE.search(line) and not _is_text(value):
        raise TasksetError(f"{where}: holds half of a surrogate pair (\\ud800 … \\udfff) → mend the text")
    if not isinstance(value, dict):
        raise TasksetError(f"{where}: a JSON {type(value).__name__} → each line must be one JSON object")
    return cast("dict[str, Any]", value)


def _is_text(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def read_parquet(path: Path) -> Iterator[Row]:
    """One row per row, 0-based.

    Raises:
        TasksetError: no such file, or it is not Parquet.
    """
    with _opened(path) as file:
        number = 0
        for batch in file.iter_batches():
            for values in batch.to_pylist():
                yield f"{path} row {number}", values
                number += 1


def jsonl_columns(path: Path, *, skip_bad: bool = False) -> dict[str, str]:
    """Columns of the first rows with Polars type names; `Object` where values are nested or of several kinds.

    Args:
        skip_bad: look past lines that are not JSON objects.

    Raises:
        TasksetError: the file is missing, empty or not JSONL.
    """
    kinds: dict[str, set[str]] = {}
    for where, line in _some(islice(read_lines(path), HEAD_ROWS), path):
        try:
            values = parse_object(line, where)
        except TasksetError:
            if not skip_bad:
                raise
            continue
        for key, value in values.items():
            kinds.setdefault(key, set()).update(() if value is None else (_kind(value),))
    return {key: _common(found) for key, found in kinds.items()}


def parquet_columns(path: Path) -> dict[str, str]:
    """Columns with Polars type names, from the file's footer.

    Raises:
        TasksetError: the file is missing, has no rows, or is not Parquet.
    """
    with _opened(path) as file:
        if file.metadata.num_rows == 0:
            raise TasksetError(f"{path} has no rows")
        return {field.name: _arrow_kind(field.type) for field in file.schema_arrow}


def _some(lines: Iterable[tuple[str, bytes]], path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines, or an error when there is none."""
    empty = True
    for line in lines:
        empty = False
        yield line
    if empty:
        raise TasksetError(f"{path} is empty → it should have one JSON object per line")


def _opened(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except OSError as error:
        raise TasksetError(f"{path} cannot be read: {error.strerror or error} → check the path") from error
    except pa.ArrowException as error:
        raise TasksetError(f"{path} is not a Parquet file: {error}") from error


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "Boolean"
    if isinstance(value, int):
        return "Int64"
    if isinstance(value, float):
        return "Float64"
    return "String" if isinstance(value, str) else "Object"


def _common(kinds: set[str]) -> str:
    if kinds == {"Int64", "Float64"}:
        return "Float64"
    return next(iter(kinds)) if len(kinds) == 1 else ("Object" if kinds else "String")


def _arrow_kind(kind: pa.DataType) -> str:
    if pa.types.is_boolean(kind):
        return "Boolean"
    if pa.types.is_integer(kind):
        return "Int64"
    if pa.types.is_floating(kind):
        return "Float64"
    return "String" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else "Object"
