"""What the configuration models declare at each place of the data: fields, kinds and the components that fit.

Messages, hints and the reference pages all need the same walk along model fields, mappings, lists and components, so it
is written once here. Nothing in this module knows about files or lines.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from buffer_engine.config import ComponentReader
from buffer_engine.errors import ConfigError
from buffer_engine.registry import Registry

_KIND_NAMES: Mapping[Any, str] = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    Path: "path",
    type(None): "null",
}

_TYPE_MEANING = "which component this is"
"""What every component's `type` means; each class narrows the field to its own name and need not say it again."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One thing that may stand at a place: a type, and the registry when it is a component."""

    kind: Any
    registry: Registry | None = None


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """One documented field: its name, kind in words, default as YAML text (None: required), and description."""

    name: str
    kind: str
    default: str | None
    description: str


def choices(annotation: Any) -> tuple[Choice, ...]:
    """The alternatives of an annotation, with `Annotated` and unions taken apart."""
    registry: Registry | None = None
    while get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
        registry = registry or _registry(metadata)
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(choice for part in get_args(annotation) for choice in choices(part))
    return (Choice(annotation, registry),)


def field_choices(info: FieldInfo) -> tuple[Choice, ...]:
    """The alternatives of a model's field."""
    registry = _registry(info.metadata)
    found = choices(info.annotation)
    return tuple(Choice(choice.kind, choice.registry or registry) for choice in found) if registry else found


def model_here(found: Sequence[Choice], value: object) -> type[BaseModel] | None:
    """The model that the keys of mapping `value` belong to; None when it is not a model's mapping or is unknown."""
    for choice in found:
        if choice.registry is not None:
            name = cast("Mapping[str, Any]", value).get("type") if isinstance(value, Mapping) else None
            if isinstance(name, str) and name in choice.registry.names():
                return cast("type[BaseModel]", choice.registry.load(name).Config)
        elif isinstance(choice.kind, type) and issubclass(choice.kind, BaseModel):
            return choice.kind
    return None


def walk(
    model: type[BaseModel], data: Mapping[str, Any], path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], tuple[Choice, ...], Any, FieldInfo | None]]:
    """Every value of `data` that `model` declares: its path, what may stand there, the value, and the nearest field.

    A component whose plug-in does not import is left out: validation reports it.
    """
    for key, value in data.items():
        info = model.model_fields.get(key)
        if info is not None:
            yield from _walk_value(field_choices(info), value, (*path, key), info)


def _walk_value(
    found: tuple[Choice, ...], value: Any, path: tuple[str | int, ...], info: FieldInfo
) -> Iterator[tuple[tuple[str | int, ...], tuple[Choice, ...], Any, FieldInfo | None]]:
    yield path, found, value, info
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, Any]", value)
        try:
            model = model_here(found, mapping)
        except ConfigError:
            return
        if model is not None:
            yield from walk(model, mapping, path)
            return
        inner = tuple(
            inner
            for choice in found
            if get_origin(choice.kind) in (dict, Mapping) and len(get_args(choice.kind)) == 2
            for inner in choices(get_args(choice.kind)[1])
        )
        for key, item in mapping.items() if inner else ():
            yield from _walk_value(inner, item, (*path, key), info)
    elif isinstance(value, list):
        for position, item in enumerate(cast("list[Any]", value)):
            inner = tuple(inner for choice in found for inner in _item_choices(choice, position))
            if inner:
                yield from _walk_value(inner, item, (*path, position), info)


def _item_choices(choice: Choice, position: int) -> tuple[Choice, ...]:
    arguments = get_args(choice.kind)
    origin = get_origin(choice.kind)
    if not arguments or origin is Literal or not isinstance(origin, type) or not issubclass(origin, Sequence):
        return ()
    if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        return choices(arguments[position]) if position < len(arguments) else ()
    return choices(arguments[0])


def kind_in_words(found: Sequence[Choice]) -> str:
    """`whole number or null`, `one of sync, async`, `component (operator)`, …"""
    names = [_kind_name(choice) for choice in found]
    return " or ".join(dict.fromkeys(names))


def _kind_name(choice: Choice) -> str:
    if choice.registry is not None:
        return f"{choice.registry.kind} component"
    origin, arguments = get_origin(choice.kind), get_args(choice.kind)
    if origin is Literal:
        values = [_yaml(argument) for argument in arguments]
        return f"one of {', '.join(values)}" if len(values) > 1 else values[0]
    if origin is dict or origin is Mapping:
        return f"mapping of name to {kind_in_words(choices(arguments[1]))}" if len(arguments) == 2 else "mapping"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        parts = [part for part in arguments if part is not Ellipsis]
        inner = kind_in_words([inner for part in parts for inner in choices(part)])
        return f"list of {inner}" if parts else "list"
    if isinstance(choice.kind, type) and issubclass(choice.kind, BaseModel):
        return "mapping"
    return _KIND_NAMES.get(choice.kind, getattr(choice.kind, "__name__", str(choice.kind)))


def document(model: type[BaseModel]) -> tuple[FieldDoc, ...]:
    """The fields of a model as a person sees them, in the order written."""
    return tuple(
        FieldDoc(
            name=name,
            kind=kind_in_words(field_choices(info)),
            default=default_text(info),
            description=info.description or (_TYPE_MEANING if name == "type" else ""),
        )
        for name, info in model.model_fields.items()
    )


def default_text(info: FieldInfo) -> str | None:
    """A field's default as YAML; None when it is required."""
    if info.is_required():
        return None
    value = info.get_default(call_default_factory=True, validated_data={})
    return _yaml(value) if value is not PydanticUndefined else None


def _yaml(value: object) -> str:
    """A short YAML spelling of a default."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, BaseModel):
        shown = [key for key in type(value).model_fields if key == "type" or key in value.model_fields_set]
        inner = [f"{key}: {_yaml(getattr(value, key))}" for key in shown]
        return "{" + ", ".join(inner) + "}" if inner else "{}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in cast("Mapping[str, Any]", value).items()) + "}"
    if isinstance(value, (list, tuple, frozenset, set)):
        return "[" + ", ".join(_yaml(item) for item in cast("Sequence[Any]", value)) + "]"
    if isinstance(value, str):
        return value if value and value.strip() == value and value.isprintable() else repr(value)
    return str(value)


def _registry(metadata: Sequence[Any]) -> Registry | None:
    return next((item.registry for item in metadata if isinstance(item, ComponentReader)), None)
