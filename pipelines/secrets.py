"""`${env:NAME}` in a specification: kept as written everywhere, replaced only in the hand of who uses it.

A specification in memory, its printed or saved form and its hash all hold the marker; `reveal` gives a copy with the
values, which must not be logged or stored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

from buffer_engine.config import ComponentConfig
from buffer_engine.errors import ConfigError, Problem

_MARKER = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_ATTEMPT = re.compile(r"\$\{\s*[Ee][Nn][Vv]\b[^}]*\}?")

ConfigT = TypeVar("ConfigT", bound=ComponentConfig)
PathParts = tuple[str | int, ...]


def reveal_text(text: str, environ: Mapping[str, str] | None = None) -> str:
    """`text` with every `${env:NAME}` replaced.

    Raises:
        ConfigError: a variable is not set; names it.
    """
    values = os.environ if environ is None else environ

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in values:
            raise ConfigError.one(f"environment variable {name} is not set", fix=f"export {name}=…")
        return values[name]

    return _MARKER.sub(replace, text)


def reveal(config: ConfigT, environ: Mapping[str, str] | None = None) -> ConfigT:
    """A copy of `config` with secrets in place of their markers; for use at once, never for writing.

    Raises:
        ConfigError: a variable is not set, or its value does not fit the field.
    """
    data = config.model_dump()
    if not any(_MARKER.search(text) for _, text in _texts(data, ())):
        return config
    return type(config).model_validate(_revealed(data, environ))


def without_markers(text: str) -> str:
    """`text` with every `${env:NAME}` replaced by something that may stand for a name, a number or a secret."""
    return _MARKER.sub("1", text)


def secret_problems(data: object, environ: Mapping[str, str] | None = None) -> Iterator[tuple[PathParts, Problem]]:
    """Markers whose variable is not set, and what looks like a marker but is none; with their place."""
    values = os.environ if environ is None else environ
    for path, text in _texts(data, ()):
        for match in _MARKER.finditer(text):
            if match.group(1) not in values:
                name = match.group(1)
                yield path, Problem(f"environment variable {name} is not set", fix=f"export {name}=… before the run")
        for match in _ATTEMPT.finditer(text):
            if not _MARKER.fullmatch(match.group()):
                yield path, Problem(f"{match.group()!r} is not a secret's marker", fix="write it as ${env:NAME}")


def _texts(data: object, path: PathParts) -> Iterator[tuple[PathParts, str]]:
    if isinstance(data, str):
        yield path, data
    elif isinstance(data, Mapping):
        for key, value in cast("Mapping[str, Any]", data).items():
            yield from _texts(value, (*path, key))
    elif isinstance(data, (list, tuple)):
        for position, value in enumerate(cast("list[Any]", data)):
            yield from _texts(value, (*path, position))


def _revealed(data: Any, environ: Mapping[str, str] | None) -> Any:
    if isinstance(data, str):
        return reveal_text(data, environ)
    if isinstance(data, Mapping):
        return {key: _revealed(value, environ) for key, value in cast("Mapping[str, Any]", data).items()}
    if isinstance(data, (list, tuple)):
        return [_revealed(value, environ) for value in cast("list[Any]", data)]
    return data
