"""One array brought to a type without losing anything, nested types included."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from buffer_engine.store.buffers import valid_of, values_of


class Misfit(Exception):
    """An array cannot become the wanted type without loss; the text says why."""


def fit(array: pa.Array, target: pa.DataType) -> pa.Array:
    """`array` as `target`, unchanged where it already is.

    Null stays null at the top. Inside a list only a floating element may be null (a log-probability where nothing was
    sampled), and a struct field only where `target` says so.

    Raises:
        Misfit: another kind of type, a value out of range or not exactly representable, NaN, infinity, a null inside.
    """
    source = array.type
    if source.equals(target) and _fits(array):
        return array
    if pt.is_dictionary(source):
        return fit(array.dictionary_decode(), target)
    if pt.is_null(source):
        return pa.nulls(len(array), target)
    if pt.is_list(target):
        return _fit_list(array, target)
    if pt.is_struct(target):
        return _fit_struct(array, target)
    if not _kinds_match(source, target):
        raise Misfit(f"expected {target}, found {source}")
    fitted = array if source.equals(target) else _cast(array, target)
    if pt.is_floating(target) and not _all_finite(fitted):
        raise Misfit("a number must be finite (null means: not known)")
    return fitted


def _fits(array: pa.Array) -> bool:
    """Whether an array of the wanted type holds nothing that `fit` refuses; False also where that is not certain.

    Nearly every append comes in the table's own types, so this decides from the buffers, without a compute call.
    """
    kind = array.type
    if pt.is_floating(kind):
        return _all_finite(array)
    if pt.is_list(kind):
        start, end = array.offset, array.offset + len(array)
        offsets = array.buffers()[1]
        if offsets is None or offsets.size == 0:
            return False
        bounds = np.frombuffer(offsets, dtype=np.int32, count=end + 1)
        values = array.values.slice(int(bounds[start]), int(bounds[end] - bounds[start]))
        return (pt.is_floating(kind.value_type) or not values.null_count) and _fits(values)
    if pt.is_struct(kind):
        for at in range(kind.num_fields):
            child = array.field(at)
            if (not kind.field(at).nullable and child.null_count) or not _fits(child):
                return False
    return True


def _fit_list(array: pa.Array, target: pa.DataType) -> pa.Array:
    source = array.type
    if not (
        pt.is_list(source)
        or pt.is_large_list(source)
        or pt.is_fixed_size_list(source)
        or pt.is_list_view(source)
        or pt.is_large_list_view(source)
    ):
        raise Misfit(f"expected {target}, found {source}")
    values = pc.list_flatten(array)
    fitted = fit(values, target.value_type)
    if fitted.null_count and not pt.is_floating(target.value_type):
        raise Misfit("an element of the list is null")
    if fitted is values and source.equals(target):
        return array
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(array) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise Misfit("the rows hold more than 2**31 elements together; append fewer at once")
    mask = array.is_null() if array.null_count else None
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), fitted, type=target, mask=mask)


def _fit_struct(array: pa.Array, target: pa.DataType) -> pa.Array:
    source = array.type
    if not pt.is_struct(source):
        raise Misfit(f"expected {target}, found {source}")
    given = {source.field(i).name: child for i, child in enumerate(array.flatten())}
    wanted = [target.field(i) for i in range(target.num_fields)]
    unknown = sorted(set(given) - {field.name for field in wanted})
    if unknown:
        raise Misfit(f"unknown field {unknown[0]!r}; known: {', '.join(field.name for field in wanted)}")
    children: list[pa.Array] = []
    for field in wanted:
        child = given.get(field.name)
        fitted = pa.nulls(len(array), field.type) if child is None else fit(child, field.type)
        if not field.nullable and fitted.null_count and pc.any(pc.and_(array.is_valid(), fitted.is_null())).as_py():
            raise Misfit(f"field {field.name!r} is null or missing")
        children.append(fitted)
    if source.equals(target) and all(
        fitted is given[field.name] for field, fitted in zip(wanted, children, strict=True)
    ):
        return array
    mask = array.is_null() if array.null_count else None
    return pa.StructArray.from_arrays(children, fields=wanted, mask=mask)


def _kinds_match(source: pa.DataType, target: pa.DataType) -> bool:
    if pt.is_string(target):
        return pt.is_string(source) or pt.is_large_string(source) or pt.is_string_view(source)
    if pt.is_boolean(target):
        return pt.is_boolean(source)
    if pt.is_integer(target):
        return pt.is_integer(source)
    if pt.is_floating(target):
        return pt.is_floating(source) or pt.is_integer(source)
    if pt.is_timestamp(target):
        return pt.is_timestamp(source) and source.tz is not None
    return source.equals(target)


def _cast(array: pa.Array, target: pa.DataType) -> pa.Array:
    narrower = pt.is_floating(target) and pt.is_floating(array.type)
    try:
        fitted = pc.cast(array, target, safe=not narrower)
    except pa.ArrowInvalid as error:
        raise Misfit(f"does not fit {target} without loss ({error})") from error
    # a narrower float is accepted only when it says exactly the same number
    if narrower and _all_finite(array) and not pc.all(pc.equal(fitted.cast(array.type), array)).as_py():
        raise Misfit(f"does not fit {target} without loss; cast it yourself where rounding is meant")
    return fitted


def _all_finite(array: pa.Array) -> bool:
    if pt.is_float16(array.type) or not pt.is_floating(array.type):
        return pc.all(pc.is_finite(array)).as_py() is not False
    finite = np.isfinite(values_of(array))
    if finite.all():
        return True
    valid = valid_of(array)  # what lies under a null is nobody's number
    return valid is not None and not bool(np.any(~finite & valid.view(np.bool_)))
