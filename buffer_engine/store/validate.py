"""Rows on their way in: brought to the table's exact schema, or refused with table, key, field and value.

Only lossless changes of type are made (large_string to string, a wider integer whose values fit, …). Anything else is
an error, never a silent cast: what the store holds is what was given.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.errors import RowError, SchemaError, did_you_mean
from buffer_engine.schema import TABLES, TableSpec
from buffer_engine.store.buffers import offsets_of, text_data
from buffer_engine.store.conform import Misfit, fit

FRAME_BYTES = 64 << 20
FRAME_ROWS = 65_536
_PARTITIONS = ("train", "eval")
_ALLOWED = {
    "tasks": {"partition": _PARTITIONS},
    "rollouts": {"partition": _PARTITIONS},
    "decisions": {"verdict": ("keep", "reject", "hold", "release", "mask")},
}


def table_spec(name: str) -> TableSpec:
    """The specification of a table.

    Raises:
        SchemaError: there is no such table.
    """
    try:
        return TABLES[name]
    except KeyError:
        raise SchemaError(f"unknown table {name!r}: {did_you_mean(name, TABLES)}") from None


def conform(spec: TableSpec, rows: pa.Table) -> list[pa.RecordBatch]:
    """The rows as record batches of exactly `spec.schema`, each of at most about `FRAME_BYTES`.

    Raises:
        SchemaError: unknown or missing column, a type that does not fit losslessly, null where none may be, NaN or
            infinity, unequal per-token lengths, a value outside a closed set.
    """
    if not rows.schema.equals(spec.schema):
        check_columns(spec, rows)
    if rows.num_rows == 0:
        return []
    per_frame = max(1, min(FRAME_ROWS, int(rows.num_rows * FRAME_BYTES // max(rows.nbytes, 1))))
    return [_conform_slice(spec, rows.slice(at, per_frame)) for at in range(0, rows.num_rows, per_frame)]


def check_columns(spec: TableSpec, rows: pa.Table) -> None:
    """Refuse columns that the table does not have, and the lack of one that it needs.

    Raises:
        SchemaError: names the column.
    """
    names: list[str] = rows.column_names
    known: list[str] = spec.schema.names
    for name in names:
        if name not in known:
            raise SchemaError(f"{spec.name}: unknown column {name!r}: {did_you_mean(name, known)}")
        if names.count(name) > 1:
            raise SchemaError(f"{spec.name}: column {name!r} occurs {names.count(name)} times; give it once")
    missing = [field.name for field in _fields(spec.name) if not field.nullable and field.name not in names]
    if missing:
        raise SchemaError(f"{spec.name}: missing column(s) {', '.join(missing)}; they may not be null")


def _conform_slice(spec: TableSpec, rows: pa.Table) -> pa.RecordBatch:
    columns: list[pa.Array] = []
    positions = {name: at for at, name in enumerate(rows.column_names)}
    for name, kind, field in _typed_fields(spec.name):
        if name not in positions:
            columns.append(pa.nulls(rows.num_rows, kind))
            continue
        chunks = rows.column(positions[name])
        given = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
        try:
            columns.append(fit(given, kind))
        except Misfit as misfit:
            raise _misfit_error(spec, rows, field, given, misfit) from misfit
    batch = pa.RecordBatch.from_arrays(columns, schema=spec.schema)
    _check_nulls(spec, batch)
    _check_values(spec, batch)
    _check_lengths(spec, batch)
    return batch


@cache
def _typed_fields(table: str) -> list[tuple[str, pa.DataType, pa.Field]]:
    """Name, type and field of a table's columns; every access to a schema makes them anew."""
    return [(field.name, field.type, field) for field in TABLES[table].schema]


def _fields(table: str) -> list[pa.Field]:
    return [field for _, _, field in _typed_fields(table)]


@cache
def _needed(table: str) -> list[tuple[int, str]]:
    """Position and name of the columns that may not be null."""
    return [(at, field.name) for at, field in enumerate(_fields(table)) if not field.nullable]


def _misfit_error(spec: TableSpec, rows: pa.Table, field: pa.Field, given: pa.Array, whole: Misfit) -> SchemaError:
    # row by row only now that one is known to be wrong, to name it
    for at in range(len(given)):
        try:
            fit(given.slice(at, 1), field.type)
        except Misfit as misfit:
            error = _row_error(spec, rows, at, field.name, f"{misfit}; there is {_short(given[at])}", colon=True)
            return error if _may_hold(given, field) else SchemaError(str(error))
    return SchemaError(f"{spec.name}: {field.name}: {whole}")


def _may_hold(given: pa.Array, field: pa.Field) -> bool:
    """Whether a column of this type could fit with other values."""
    try:
        fit(given.slice(0, 0), field.type)
    except Misfit:
        return False
    return True


def _row_error(
    spec: TableSpec, rows: pa.Table | pa.RecordBatch, at: int, field: str, reason: str, *, colon: bool = False
) -> RowError:
    label = row_label(spec, rows, at)
    has_key = bool(spec.key) and all(
        name in rows.schema.names and rows.column(name)[at].as_py() is not None for name in spec.key
    )
    text = f"{spec.name}: {label}: {field}{':' if colon else ''} {reason}"
    return RowError(text, label=label, has_key=has_key, field=field, reason=reason)


def _check_nulls(spec: TableSpec, batch: pa.RecordBatch) -> None:
    for position, name in _needed(spec.name):
        column = batch.column(position)
        if column.null_count:
            at = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise _row_error(spec, batch, at, name, "is null; it needs a value")


def _check_values(spec: TableSpec, batch: pa.RecordBatch) -> None:
    for name, allowed in _ALLOWED.get(spec.name, {}).items():
        column = batch.column(name)
        if not set(column.unique().to_pylist()).issubset(allowed):
            at = int(np.flatnonzero(~pc.is_in(column, pa.array(allowed)).to_numpy(zero_copy_only=False))[0])
            raise _row_error(spec, batch, at, name, f"is {_short(column[at])}; known: {', '.join(allowed)}")
    for name in spec.key:
        column = batch.column(name)
        # a NUL ends a text value for half of the tools that read a catalog
        if pa.types.is_string(column.type) and _has_nul(column):
            wrong = np.flatnonzero(pc.match_substring(column, "\0").to_numpy(zero_copy_only=False))
            if len(wrong):
                raise _row_error(spec, batch, int(wrong[0]), name, "contains a NUL character")


def _check_lengths(spec: TableSpec, batch: pa.RecordBatch) -> None:
    if not spec.per_token:
        return
    lengths_of = {name: np.diff(offsets_of(batch.column(name))) for name in (spec.length_of, *spec.per_token)}
    if all(
        np.array_equal(lengths_of[spec.length_of], lengths_of[name]) and not batch.column(name).null_count
        for name in spec.per_token
    ):
        return
    expected = pc.list_value_length(batch.column(spec.length_of)).to_numpy(zero_copy_only=False)
    for name in spec.per_token:
        column = batch.column(name)
        lengths = pc.list_value_length(column).fill_null(-1).to_numpy(zero_copy_only=False)
        wrong = np.flatnonzero((lengths != expected) & (lengths >= 0))
        if len(wrong):
            at = int(wrong[0])
            raise _row_error(
                spec, batch, at, name,
                f"has length {lengths[at]} and {spec.length_of} has length {expected[at]}; both describe the same "
                "tokens",
            )  # fmt: skip


def _has_nul(column: pa.Array) -> bool:
    offsets = offsets_of(column)
    data = np.frombuffer(text_data(column), dtype=np.uint8)[offsets[0] : offsets[-1]]
    return len(data) > 0 and int(data.min()) == 0


def row_label(spec: TableSpec, rows: pa.Table | pa.RecordBatch, at: int) -> str:
    """`experience_id='x1'`, or the row number where a key is missing or the table has none."""
    names = [name for name in spec.key if name in rows.schema.names]
    parts = [f"{name}={_short(rows.column(name)[at])}" for name in names]
    return ", ".join(parts) if parts else f"row {at}"


def _short(value: pa.Scalar) -> str:
    # a nanosecond timestamp has no Python value, so it is shown as the number it is
    text = f"{value.value} {value.type}" if pa.types.is_timestamp(value.type) else repr(value.as_py())
    return text if len(text) <= 120 else text[:117] + "…"
