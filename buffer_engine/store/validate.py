"""Rows on their way in: brought to the table's exact schema, or refused with table, key, field and value.

Only lossless changes of type are made (large_string to string, a wider integer whose values fit, …). Anything else is
an error, never a silent cast: what the store holds is what was given.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.errors import SchemaError, did_you_mean
from buffer_engine.schema import TABLES, TableSpec
from buffer_engine.store.conform import Misfit, fit

FRAME_BYTES = 64 << 20
FRAME_ROWS = 65_536
_ALLOWED = {
    "partition": ("train", "eval"),
    "verdict": ("keep", "reject", "hold", "release", "mask"),
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
    _check_columns(spec, rows)
    if rows.num_rows == 0:
        return []
    per_frame = max(1, min(FRAME_ROWS, int(rows.num_rows * FRAME_BYTES // max(rows.nbytes, 1))))
    return [_conform_slice(spec, rows.slice(at, per_frame)) for at in range(0, rows.num_rows, per_frame)]


def _check_columns(spec: TableSpec, rows: pa.Table) -> None:
    names: list[str] = rows.column_names
    for name in names:
        if name not in spec.schema.names:
            raise SchemaError(f"{spec.name}: unknown column {name!r}: {did_you_mean(name, spec.schema.names)}")
        if names.count(name) > 1:
            raise SchemaError(f"{spec.name}: column {name!r} occurs {names.count(name)} times; give it once")
    missing = [field.name for field in spec.schema if not field.nullable and field.name not in names]
    if missing:
        raise SchemaError(f"{spec.name}: missing column(s) {', '.join(missing)}; they may not be null")


def _conform_slice(spec: TableSpec, rows: pa.Table) -> pa.RecordBatch:
    columns: list[pa.Array] = []
    for field in spec.schema:
        if field.name not in rows.column_names:
            columns.append(pa.nulls(rows.num_rows, field.type))
            continue
        given = rows.column(field.name).combine_chunks()
        try:
            columns.append(fit(given, field.type))
        except Misfit as misfit:
            raise _misfit_error(spec, rows, field, given, misfit) from misfit
    batch = pa.RecordBatch.from_arrays(columns, schema=spec.schema)
    _check_nulls(spec, batch)
    _check_values(spec, batch)
    _check_lengths(spec, batch)
    return batch


def _misfit_error(spec: TableSpec, rows: pa.Table, field: pa.Field, given: pa.Array, whole: Misfit) -> SchemaError:
    # row by row only now that one is known to be wrong, to name it
    for at in range(len(given)):
        try:
            fit(given.slice(at, 1), field.type)
        except Misfit as misfit:
            return SchemaError(
                f"{spec.name}: {row_label(spec, rows, at)}: {field.name}: {misfit}; there is {_short(given[at])}"
            )
    return SchemaError(f"{spec.name}: {field.name}: {whole}")


def _check_nulls(spec: TableSpec, batch: pa.RecordBatch) -> None:
    for field in spec.schema:
        column = batch.column(field.name)
        if not field.nullable and column.null_count:
            at = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise SchemaError(f"{spec.name}: {row_label(spec, batch, at)}: {field.name} is null; it needs a value")


def _check_values(spec: TableSpec, batch: pa.RecordBatch) -> None:
    for name, allowed in _ALLOWED.items():
        if name in spec.schema.names:
            column = batch.column(name)
            wrong = np.flatnonzero(~pc.is_in(column, pa.array(allowed)).to_numpy(zero_copy_only=False))
            if len(wrong):
                at = int(wrong[0])
                raise SchemaError(
                    f"{spec.name}: {row_label(spec, batch, at)}: {name} is {_short(column[at])}; "
                    f"known: {', '.join(allowed)}"
                )
    for name in spec.key:
        column = batch.column(name)
        if pa.types.is_string(column.type):
            # a NUL ends a text value for half of the tools that read a catalog
            wrong = np.flatnonzero(pc.match_substring(column, "\0").to_numpy(zero_copy_only=False))
            if len(wrong):
                raise SchemaError(f"{spec.name}: {name} {_short(column[int(wrong[0])])} contains a NUL character")


def _check_lengths(spec: TableSpec, batch: pa.RecordBatch) -> None:
    if not spec.per_token:
        return
    expected = pc.list_value_length(batch.column("token_ids")).to_numpy(zero_copy_only=False)
    for name in spec.per_token:
        column = batch.column(name)
        lengths = pc.list_value_length(column).fill_null(-1).to_numpy(zero_copy_only=False)
        wrong = np.flatnonzero((lengths != expected) & (lengths >= 0))
        if len(wrong):
            at = int(wrong[0])
            raise SchemaError(
                f"{spec.name}: {row_label(spec, batch, at)}: {name} has length {lengths[at]} and token_ids has length "
                f"{expected[at]}; both describe the same tokens"
            )


def row_label(spec: TableSpec, rows: pa.Table | pa.RecordBatch, at: int) -> str:
    """`experience_id='x1'`, or the row number where a key is missing or the table has none."""
    names = [name for name in spec.key if name in rows.schema.names]
    parts = [f"{name}={_short(rows.column(name)[at])}" for name in names]
    return ", ".join(parts) if parts else f"row {at}"


def _short(value: pa.Scalar) -> str:
    # a nanosecond timestamp has no Python value, so it is shown as the number it is
    text = f"{value.value} {value.type}" if pa.types.is_timestamp(value.type) else repr(value.as_py())
    return text if len(text) <= 120 else text[:117] + "…"
