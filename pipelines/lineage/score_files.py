"""Late scores from a file a person or a program wrote: CSV, JSON lines or Parquet, with the line of every row."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from buffer_engine.errors import UsageError, did_you_mean
from buffer_engine.scoring import COLUMNS

NUMBERS = ("value", "weight")
_Row = tuple[str, dict[str, Any]]


def read_scores(file: Path) -> tuple[pa.Table, list[str]]:
    """The rows of a file as `buffer_engine.scoring.add_scores` takes them, and where each stands (`line 3`).

    An empty cell of a CSV is null.

    Raises:
        UsageError: the file is missing, is none of the three kinds, cannot be read, or has other columns or types;
            names the line.
    """
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise UsageError(f"{file}: {did_you_mean(file.suffix or 'no suffix', _READERS)}")
    try:
        found = list(reader(file))
    except FileNotFoundError as error:
        raise UsageError(f"{file}: there is no such file") from error
    except (OSError, UnicodeDecodeError, pa.ArrowException, csv.Error) as error:
        raise UsageError(f"{file}: cannot be read ({error})") from error
    if not found:
        raise UsageError(f"{file}: there are no scores in it")
    present = {name for _, row in found for name in row}
    unknown = sorted(present - set(COLUMNS))
    if unknown:
        place = next(place for place, row in found if unknown[0] in row)
        raise UsageError(f"{file}, {place}: unknown column {unknown[0]!r}: {did_you_mean(unknown[0], COLUMNS)}")
    columns = {
        name: pa.array(
            [_typed(file, place, name, row.get(name)) for place, row in found],
            pa.float64() if name in NUMBERS else pa.string(),
        )
        for name in COLUMNS
        if name in present
    }
    return pa.table(columns), [place for place, _ in found]


def _typed(file: Path, place: str, name: str, value: Any) -> Any:
    if value is None:
        return None
    if name not in NUMBERS:
        if isinstance(value, str):
            return value
        raise UsageError(f"{file}, {place}: {name} is {value!r}; it must be text")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UsageError(f"{file}, {place}: {name} is {value!r}; it must be a number or null")
    try:
        return float(value)
    except ValueError as error:
        raise UsageError(f"{file}, {place}: {name} is {value!r}; it must be a number, or empty for none") from error


def _csv_rows(file: Path) -> Iterator[_Row]:
    with open(file, encoding="utf-8-sig", newline="") as text:
        reader = csv.DictReader(text, restkey="", strict=True)
        while True:
            line = reader.line_num + 1
            try:
                row = next(reader)
            except StopIteration:
                return
            # The header counts as a line, and a quoted value may hold several.
            place = f"line {2 if line == 1 else line}"
            if "" in row or None in row.values():
                raise UsageError(f"{file}, {place}: it has another number of cells than the header")
            yield place, {name: value if value != "" else None for name, value in row.items()}


def _json_rows(file: Path) -> Iterator[_Row]:
    with open(file, encoding="utf-8") as text:
        for number, line in enumerate(text, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UsageError(f"{file}, line {number}: not JSON ({error.msg} at column {error.colno})") from error
            if not isinstance(row, dict):
                raise UsageError(f"{file}, line {number}: {line.strip()[:40]!r} is no JSON object")
            yield f"line {number}", cast("dict[str, Any]", row)


def _parquet_rows(file: Path) -> Iterator[_Row]:
    import pyarrow.parquet as pq

    for number, row in enumerate(pq.read_table(file).to_pylist(), start=1):
        yield f"row {number}", row


_READERS: dict[str, Callable[[Path], Iterator[_Row]]] = {
    ".csv": _csv_rows,
    ".jsonl": _json_rows,
    ".parquet": _parquet_rows,
}
