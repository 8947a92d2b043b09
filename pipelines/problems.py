"""Validation errors as sentences: where, what was there, what fits, and the nearest valid name.

pydantic's locations contain labels of union members and the like; here they are brought back to the keys and positions
that the person wrote. Values that pydantic would quietly convert (`"8"` for 8, `true` for 1) are reported as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from buffer_engine.errors import ConfigError, did_you_mean
from pipelines.describe import Choice, FieldDoc, default_text, document, kind_in_words, model_here, walk
from pipelines.spec import NAME_PATTERN
from pipelines.yaml_text import PathParts, parse_value

_EXPECTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "none_required": "null",
}
_BOUNDS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


@dataclass(frozen=True, slots=True)
class Complaint:
    """One validation problem at a place of the data.

    Attributes:
        path: keys and positions, as written; for a missing key, the key that should be there.
        removes: what has to be taken out of the data so that the rest can be validated without this problem.
    """

    path: PathParts
    message: str
    fix: str
    removes: PathParts


def complaints(model: type[BaseModel], data: Mapping[str, Any], error: ValidationError) -> list[Complaint]:
    """Every error of one validation, in the order of the model's fields; one complaint a place."""
    found: dict[PathParts, Complaint] = {}
    through_union: set[PathParts] = set()
    for detail in error.errors():
        path, skipped = _written_path(data, detail)
        complaint = _complaint(model, data, path, detail)
        if complaint.path in found:
            found[complaint.path] = _both(found[complaint.path], complaint)
        else:
            found[complaint.path] = complaint
        if skipped:
            through_union.add(complaint.path)
    # A value that fits no member of a union gives one error a member: the deepest says most.
    shallow = {
        path
        for path in through_union
        for other in through_union
        if len(other) > len(path) and other[: len(path)] == path
    }
    return [complaint for path, complaint in found.items() if path not in shallow]


def conversions(model: type[BaseModel], data: Mapping[str, Any]) -> Iterator[Complaint]:
    """Scalars of another kind than their field, which validation would convert without a word."""
    for path, found, value, info in walk(model, data):
        if not isinstance(value, (str, bool, int)) or any(choice.registry is not None for choice in found):
            continue
        kinds = {kind for choice in found for kind in _scalar_kinds(choice)}
        if not kinds & {int, float, bool} or Any in kinds or type(value) in kinds:
            continue
        if type(value) is int and float in kinds:
            continue
        default = default_text(info) if info is not None and isinstance(path[-1], str) else None
        fix = f"the default is {default}" if default not in (None, "null") else ""
        if isinstance(value, str) and _fits_unquoted(value, kinds):
            fix = "remove the quotes"
        yield Complaint(path, f"expected {_a(kind_in_words(found))}, found {shown(value)}", fix, path)


def _fits_unquoted(text: str, kinds: set[Any]) -> bool:
    """Whether the text without its quotes would be a value of one of the kinds."""
    try:
        value = parse_value(text)
    except ConfigError:
        return False
    return type(value) in kinds or (type(value) is int and float in kinds)


def _scalar_kinds(choice: Choice) -> tuple[Any, ...]:
    if get_origin(choice.kind) is Literal:
        return tuple(type(value) for value in get_args(choice.kind))
    if choice.kind is Path:
        return (str,)
    return (choice.kind,)


def _written_path(data: Mapping[str, Any], detail: ErrorDetails) -> tuple[PathParts, bool]:
    """The location as keys and positions of the data, and whether labels that are neither were left out."""
    path: PathParts = ()
    here: Any = data
    skipped = False
    location = detail["loc"]
    for position, part in enumerate(location):
        if isinstance(here, Mapping) and part in here:
            path, here = (*path, part), cast("Mapping[Any, Any]", here)[part]
        elif isinstance(here, list) and isinstance(part, int) and part < len(cast("list[Any]", here)):
            path, here = (*path, part), cast("list[Any]", here)[part]
        elif position == len(location) - 1 and detail["type"] == "missing":
            path = (*path, part)
        else:
            skipped = True
    return path, skipped


def _complaint(model: type[BaseModel], data: Mapping[str, Any], path: PathParts, detail: ErrorDetails) -> Complaint:
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "extra_forbidden":
        fields = _fields_at(model, data, path[:-1])
        return Complaint(path, f"unknown key {path[-1]!r}", did_you_mean(str(path[-1]), fields), path)
    if kind == "missing":
        doc = _fields_at(model, data, path[:-1]).get(str(path[-1]))
        about = f" ({doc.kind}: {doc.description})" if doc is not None and doc.description else ""
        return Complaint(path, f"required key {path[-1]!r} is missing", f"add `{path[-1]}: …`{about}", path[:-1])
    if kind == "unknown_component":
        message = f"unknown {context.get('kind')} {context.get('name')}"
        return Complaint((*path, "type"), message, str(context.get("fix", "")), path)
    if kind == "missing_type":
        return Complaint(path, f"a {context.get('kind')} needs a `type`", str(context.get("fix", "")), path)
    if kind == "misfit":  # fields that do not go together: one of them is to blame, any of them may be missing
        return Complaint((*path, str(context.get("field"))), str(context.get("said")), str(context.get("fix")), path)
    doc = _doc_at(model, data, path)
    usual = f"the default is {doc.default}" if doc is not None and doc.default not in (None, "null") else ""
    if kind == "literal_error":
        allowed = [part.strip("'\" ") for part in str(context.get("expected", "")).replace(" or ", ", ").split(",")]
        fix = did_you_mean(value, allowed) if isinstance(value, str) else usual
        return Complaint(path, f"expected one of {', '.join(allowed)}, found {shown(value)}", fix, path)
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        limit = f"{words} {context.get(key)}"
        return Complaint(path, f"must be {limit}, found {shown(value)}", usual or f"write a number {limit}", path)
    if kind == "string_pattern_mismatch":
        allowed = "letters, digits, `_`, `.` and `-`" if context.get("pattern") == NAME_PATTERN else ""
        fix = doc.description if doc is not None else f"use only {allowed}" if allowed else ""
        return Complaint(path, f"{shown(value)} does not match {context.get('pattern')}", fix, path)
    if kind in _EXPECTED:
        fix = _type_fix(kind, value, usual)
        if isinstance(value, str) and _is_component(model, data, path):
            fix = f"write {{type: {value}}} if {value} is its type"
        return Complaint(path, f"expected {_EXPECTED[kind]}, found {shown(value)}", fix, path)
    message = detail["msg"].removeprefix("Value error, ")
    found = f", found {shown(value)}" if kind not in ("value_error", "assertion_error") else ""
    return Complaint(path, f"{message[:1].lower()}{message[1:]}{found}", usual, path)


def _type_fix(kind: str, value: object, usual: str) -> str:
    if value is None:
        return "give a value or remove the key"
    if kind in ("list_type", "tuple_type") and isinstance(value, Mapping):
        return "begin each item with `- `"
    if kind == "string_type" and isinstance(value, (int, float)):
        return "put it in quotes"
    return usual


def _both(first: Complaint, second: Complaint) -> Complaint:
    """Two errors at one place: members of a union that both did not fit."""
    head = "expected "
    if not (first.message.startswith(head) and second.message.startswith(head)):
        return first
    wanted, _, rest = first.message.removeprefix(head).partition(", found ")
    also = second.message.removeprefix(head).partition(", found ")[0]
    if also in wanted.split(" or "):
        return first
    return Complaint(first.path, f"{head}{wanted} or {also}, found {rest}", first.fix, first.removes)


def _model_at(model: type[BaseModel], data: Mapping[str, Any], path: PathParts) -> type[BaseModel] | None:
    if not path:
        return model
    for here, found, value, _ in walk(model, data):
        if here == path:
            return model_here(found, value)
    return None


def _is_component(model: type[BaseModel], data: Mapping[str, Any], path: PathParts) -> bool:
    return any(
        here == path and any(choice.registry is not None for choice in found) for here, found, _, _ in walk(model, data)
    )


def _fields_at(model: type[BaseModel], data: Mapping[str, Any], path: PathParts) -> dict[str, FieldDoc]:
    owner = _model_at(model, data, path)
    return {doc.name: doc for doc in document(owner)} if owner is not None else {}


def _doc_at(model: type[BaseModel], data: Mapping[str, Any], path: PathParts) -> FieldDoc | None:
    names = [part for part in path if isinstance(part, str)]
    return _fields_at(model, data, path[:-1]).get(names[-1]) if names and path[-1] == names[-1] else None


def shown(value: object) -> str:
    """A value as a person wrote it, with its kind where that matters."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        text = repr(value) if len(value) <= 60 else f"{value[:57]!r}…"
        return f"the text {text}"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, Sequence):
        return "a list"
    return str(value)


def _a(kind: str) -> str:
    return f"a {kind}" if kind.startswith(("whole", "number", "path")) else kind
