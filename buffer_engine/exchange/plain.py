"""Arrow values as JSON knows them, decided once per column rather than once per value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, cast

import pyarrow as pa
import pyarrow.types as pt

Convert = Callable[[Any], Any]


def converter(kind: pa.DataType) -> Convert | None:
    """What makes a value of this type one of JSON's; None when it is one already."""
    if pt.is_map(kind):
        inner = converter(kind.item_type)
        return lambda pairs: {str(key): value if inner is None else _each(inner, value) for key, value in pairs.items()}
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        inner = converter(kind.value_type)
        return None if inner is None else lambda values: [_each(inner, value) for value in values]
    if pt.is_struct(kind):
        fields = [(kind.field(at).name, converter(kind.field(at).type)) for at in range(kind.num_fields)]
        changing = [(name, inner) for name, inner in fields if inner is not None]
        if not changing:
            return None
        return lambda value: {**value, **{name: _each(inner, value[name]) for name, inner in changing}}
    if pt.is_boolean(kind) or pt.is_integer(kind) or pt.is_floating(kind) or pt.is_null(kind):
        return None
    if pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind):
        return None
    return _plain


def first_not_finite(row: Mapping[str, Any]) -> tuple[str, float]:
    """The column with a number that JSON has no word for, and the number."""
    for name, value in row.items():
        found = _not_finite(value)
        if found is not None:
            return name, found
    raise ValueError("every number is finite")


def _not_finite(value: object) -> float | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else value
    if isinstance(value, Mapping):
        inner: Sequence[object] = list(cast("Mapping[str, object]", value).values())
    elif isinstance(value, list):
        inner = cast("list[object]", value)
    else:
        return None
    return next((found for one in inner if (found := _not_finite(one)) is not None), None)


def _each(convert: Convert, value: Any) -> Any:
    return None if value is None else convert(value)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, str | int | float | bool) else str(value)
