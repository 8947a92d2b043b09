"""Small files with rows that an operator looks things up in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from buffer_engine.errors import OperatorError, did_you_mean


def read_table(file: Path, *, columns: Sequence[str], operator: str) -> pl.DataFrame:
    """The named columns of a Parquet, CSV or JSON Lines file, all its rows.

    Raises:
        OperatorError: the ending is none of these, the file cannot be read, or it lacks a column.
    """
    readers = {
        ".parquet": pl.read_parquet,
        ".csv": lambda path: pl.read_csv(path, infer_schema_length=None),
        ".jsonl": lambda path: pl.read_ndjson(path, infer_schema_length=None),
        ".ndjson": lambda path: pl.read_ndjson(path, infer_schema_length=None),
    }
    reader = readers.get(file.suffix.lower())
    if reader is None:
        raise OperatorError(f"operator {operator!r}: {file} is none of {', '.join(readers)}")
    try:
        table = reader(file)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise OperatorError(f"operator {operator!r} cannot read {file}: {error}") from error
    for name in columns:
        if name not in table.columns:
            hint = did_you_mean(name, table.columns)
            raise OperatorError(f"operator {operator!r}: {file} has no column {name!r} → {hint}")
    return table.select(list(dict.fromkeys(columns)))
