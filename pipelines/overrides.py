"""`--set a.b=value`: changes to the data of a YAML file before it is checked.

A path names keys, list positions, or the id (or, failing that, the type) of an item of a list: the same words that
reports use, so `operators.style.weight=0.1` works without counting.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from buffer_engine.errors import ConfigError, Problem, did_you_mean
from pipelines.yaml_text import PathParts, dotted, parse_value


@dataclass(frozen=True, slots=True)
class Overridden:
    """Data with overrides applied.

    Attributes:
        data: a changed copy.
        places: path that an override set → the override as written.
        problems: overrides that could not be applied; each names its `--set`.
    """

    data: dict[str, Any]
    places: dict[PathParts, str]
    problems: tuple[Problem, ...]

    def source(self, path: PathParts, *, written: bool = True) -> str | None:
        """The override that gave the value at `path`, if one did; for a place not `written` in the file also one that
        made it on the way to something below."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        below = (text for place, text in self.places.items() if path and place[: len(path)] == path)
        return None if written else next(below, None)


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> Overridden:
    """`data` changed by each `path=value`, in order; `data` itself stays as it is."""
    changed = copy.deepcopy(data)
    places: dict[PathParts, str] = {}
    problems: list[Problem] = []
    for text in overrides:
        try:
            path, value = _parse(text)
            places[_assign(changed, path, value, text)] = text
        except ConfigError as error:
            problems.extend(error.problems)
    return Overridden(changed, places, tuple(problems))


def _parse(text: str) -> tuple[list[str], Any]:
    left, equals, right = text.partition("=")
    parts = left.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError.one(f"--set {text}: not of the form path=value", fix="for example --set loop.steps=5")
    try:
        return parts, parse_value(right)
    except ConfigError as error:
        raise ConfigError.one(
            f"--set {text}: {error.problems[0].message}", fix="quote the value for the shell"
        ) from error


def _assign(data: dict[str, Any], parts: Sequence[str], value: Any, text: str) -> PathParts:
    path: PathParts = ()
    here: Any = data
    for part in parts[:-1]:
        step = _step(here, part, path, text)
        if isinstance(here, dict) and cast("dict[str, Any]", here).get(cast("str", step)) is None:
            here[step] = {}
        here, path = here[step], (*path, step)
    last = _step(here, parts[-1], path, text)
    here[last] = value
    return (*path, last)


def _step(here: Any, part: str, path: PathParts, text: str) -> str | int:
    """The key or position that `part` means inside `here`."""
    if isinstance(here, dict):
        return part
    where = dotted(path)
    if not isinstance(here, list):
        raise ConfigError.one(f"--set {text}: {where} is a single value and has no {part!r} in it", path=where)
    items = cast("list[Any]", here)
    if part.lstrip("-").isdigit():
        if 0 <= int(part) < len(items):
            return int(part)
        raise ConfigError.one(f"--set {text}: {where} has {len(items)} items, numbered from 0", path=where)
    mappings = [
        (position, cast("dict[str, Any]", item)) for position, item in enumerate(items) if isinstance(item, dict)
    ]
    for key in ("id", "type"):
        found = [
            position for position, item in mappings if item.get(key) == part and (key == "id" or not item.get("id"))
        ]
        if len(found) == 1:
            return found[0]
        if found:
            raise ConfigError.one(f"--set {text}: {len(found)} items of {where} are called {part!r}", path=where,
                                  fix="use the position, or give them ids")  # fmt: skip
    known = [str(item.get("id") or item.get("type")) for _, item in mappings]
    raise ConfigError.one(f"--set {text}: {where} has no item {part!r}", path=where, fix=did_you_mean(part, known))
