"""JSON in texts, and validators of JSON Schema that never reach for the network."""

from __future__ import annotations

import json
import re
from typing import Any

from buffer_engine.extras import require

_FENCE = re.compile(r"```[A-Za-z0-9_-]*[ \t]*\n(.*?)```", re.DOTALL)
_START = re.compile(r"[{\[]")


class NoJsonError(ValueError):
    """A text holds no JSON where it should."""


class BadSchemaError(ValueError):
    """What should be a JSON schema is none."""


def strict_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        NoJsonError: it is not JSON; NaN and Infinity, which Python would take, are not.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise NoJsonError(f"not JSON: {error}") from error


def last_json(text: str) -> Any:
    """The JSON of a reply: the whole text; else the last fenced block that is JSON; else the last object or array.

    Raises:
        NoJsonError: there is none.
    """
    try:
        return strict_json(text)
    except NoJsonError:
        pass  # the text is more than its JSON, which is looked for below
    for block in reversed(_FENCE.findall(text)):
        try:
            return strict_json(block)
        except NoJsonError:
            continue
    decoder = json.JSONDecoder(parse_constant=_refuse)
    found: list[Any] = []
    place = 0
    while (start := _START.search(text, place)) is not None:
        try:
            value, place = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            place = start.end()
        else:
            found.append(value)
    if not found:
        raise NoJsonError("no JSON in the text")
    return found[-1]


def validator(schema: Any, *, name: str) -> Any:
    """A jsonschema-rs validator; references to other documents are not followed.

    Raises:
        BadSchemaError: the schema is none.
        MissingExtraError: jsonschema-rs is not installed.
    """
    library: Any = require("jsonschema_rs", "schema")
    try:
        return library.validator_for(schema, offline=True)
    except Exception as error:
        said = str(error).split("\n", 1)[0]
        raise BadSchemaError(f"{name} is not a JSON schema: {said}") from error


def first_error(validate: Any, value: Any) -> str | None:
    """The first way in which a value breaks the schema, with its place; None: it does not."""
    for error in validate.iter_errors(value):
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.instance_path)
        return f"{place.lstrip('.') or 'value'}: {error.message}"
    return None


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
