"""Lines of JSON as rows of a table: exact, so that nothing is rounded, dropped or taken for something else.

What JSON cannot say comes as text: times in ISO 8601 with their zone. A line that does not fit is told apart by its
number; its neighbours are read all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.types as pt

from buffer_engine.errors import ExchangeError, did_you_mean
from buffer_engine.schema import TableSpec


@dataclass(frozen=True, slots=True)
class Bad:
    """A row that is not taken: where it stands and why."""

    place: str
    message: str


@dataclass(frozen=True, slots=True)
class JsonChunk:
    """Readable rows with their places, and the others."""

    rows: pa.Table
    places: tuple[str, ...]
    bad: tuple[Bad, ...]


class JsonRows:
    """One file of JSON lines."""

    def __init__(self, path: Path, spec: TableSpec | None) -> None:
        """Rows of the table `spec`; None: only `first_keys` may be asked."""
        self._path = path
        self._spec = spec

    def first_keys(self) -> Sequence[str]:
        """Keys of the first line that is an object; empty when there is none."""
        for _, line in islice(self._lines(), 100):
            try:
                value: object = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                return list(cast("dict[str, object]", value))
        return []

    def chunks(self, rows: int) -> Iterator[JsonChunk]:
        """All lines that are not blank, `rows` at a time."""
        lines = self._lines()
        while part := list(islice(lines, rows)):
            yield self._chunk(part)

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield f"{self._path}:{number}", line
        except OSError as error:
            raise ExchangeError(f"{self._path}: cannot be read: {error.strerror or error}") from error

    def _chunk(self, lines: Sequence[tuple[str, bytes]]) -> JsonChunk:
        assert self._spec is not None
        good: list[tuple[str, dict[str, Any]]] = []
        bad: list[Bad] = []
        for place, line in lines:  # each line is told apart in the message about it
            try:
                good.append((place, _object(line, self._spec)))
            except (ValueError, RecursionError) as error:
                bad.append(Bad(place, str(error) or type(error).__name__))
        columns: list[pa.Array] = []
        names = [name for name in self._spec.schema.names if any(name in row for _, row in good)]
        for name in names:
            kind = self._spec.schema.field(name).type
            columns.append(pa.array([row.get(name) for _, row in good], kind))
        rows = pa.table(dict(zip(names, columns, strict=True)))
        return JsonChunk(rows, tuple(place for place, _ in good), tuple(bad))


def _object(line: bytes, spec: TableSpec) -> dict[str, Any]:
    """The row of a line.

    Raises:
        ValueError: what is wrong, with the field.
    """
    try:
        value: object = json.loads(line, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error}); each line must be one object") from error
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}; each line must be one object")
    row = cast("dict[str, Any]", value)
    known: list[str] = spec.schema.names
    for name in row:
        if name not in known:
            raise ValueError(f"unknown column {name!r}: {did_you_mean(name, known)}")
    label = ", ".join(f"{name}={row.get(name)!r}" for name in spec.key)
    try:
        return {name: _fitted(given, spec.schema.field(name).type, name) for name, given in row.items()}
    except ValueError as error:
        raise ValueError(f"{label}: {error}" if label else str(error)) from error


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON; write null where there is none")


def _fitted(value: Any, kind: pa.DataType, name: str) -> Any:
    """A value of JSON as what the type holds; a number is never rounded, save a float that has no shorter form.

    Raises:
        ValueError: it is something else; names the field.
    """
    if value is None:
        return None
    if pt.is_list(kind):
        if not isinstance(value, list):
            raise ValueError(f"{name} is {_short(value)}; it must be a list")
        inner = kind.value_type
        items = cast("list[Any]", value)
        if pt.is_integer(inner) and all(type(one) is int for one in items):
            return _in_range(items, inner, name)
        return [_fitted(one, inner, f"{name}[{at}]") for at, one in enumerate(items)]
    if pt.is_struct(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{name} is {_short(value)}; it must be an object")
        fields = {kind.field(at).name: kind.field(at).type for at in range(kind.num_fields)}
        given = cast("dict[str, Any]", value)
        for key in given:
            if key not in fields:
                raise ValueError(f"{name}: unknown field {key!r}: {did_you_mean(key, fields)}")
        return {key: _fitted(given.get(key), inner, f"{name}.{key}") for key, inner in fields.items()}
    if pt.is_string(kind):
        return _text(value, name)
    if pt.is_boolean(kind):
        return _of(value, bool, "true or false", name)
    if pt.is_integer(kind):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} is {_short(value)}; it must be a whole number")
        return _in_range([value], kind, name)[0]
    if pt.is_timestamp(kind):
        return _moment(_text(value, name), name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {_short(value)}; it must be a number")
    return float(value)


def _in_range(values: list[int], kind: pa.DataType, name: str) -> list[int]:
    limit = 1 << (kind.bit_width - 1)
    for value in (min(values), max(values)) if values else ():
        if not -limit <= value < limit:
            raise ValueError(f"{name} is {value}, which does not fit {kind}")
    return values


def _text(value: Any, name: str) -> str:
    text: str = _of(value, str, "text", name)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds half of a surrogate pair (\\ud800 … \\udfff); mend the text") from error
    return text


def _of(value: Any, kind: type, what: str, name: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {_short(value)}; it must be {what}")
    return value


def _moment(text: str, name: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}; it must be a time like 2025-01-31T09:00:00+00:00") from error
    if moment.tzinfo is None:
        raise ValueError(f"{name} is {text!r}, which has no time zone; write +00:00 after it when it is UTC")
    return moment


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
