"""Names to components, as import strings, so that listing what exists imports nothing.

Plug-ins of other distributions come in through entry points of the group `buffer_engine.<kind>`; their names contain a
dot, so they can never shadow one of ours.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any

from buffer_engine.errors import ConfigError, UnknownComponentError


@dataclass(frozen=True)
class Registry:
    """Component names of one kind and where each lives (`package.module:Attribute`)."""

    kind: str
    group: str
    builtin: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _plugins(self) -> dict[str, tuple[str, str]]:
        found: dict[str, tuple[str, str]] = {}
        for point in entry_points(group=f"buffer_engine.{self.group}"):
            distribution = point.dist.name if point.dist is not None else "an unknown distribution"
            if "." not in point.name:
                raise ConfigError.one(
                    f"{self.kind} plug-in {point.name!r} of {distribution} has no dot in its name",
                    fix=f"name it '{distribution}.{point.name}'",
                )
            found[point.name] = (point.value, distribution)
        return found

    def names(self) -> tuple[str, ...]:
        """All known names, sorted; imports nothing."""
        return tuple(sorted({*self.builtin, *self._plugins}))

    def target(self, name: str) -> str:
        """The import string behind `name`.

        Raises:
            UnknownComponentError: nothing has that name; the message suggests the nearest.
        """
        if name in self.builtin:
            return self.builtin[name]
        if name in self._plugins:
            return self._plugins[name][0]
        raise UnknownComponentError.named(self.kind, name, self.names())

    def load(self, name: str) -> Any:
        """Import and return the component called `name`.

        Raises:
            UnknownComponentError: nothing has that name.
            ConfigError: a plug-in failed to import; names its distribution.
        """
        target = self.target(name)
        module, _, attribute = target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            if name in self._plugins:
                raise ConfigError.one(
                    f"{self.kind} {name!r} of distribution {self._plugins[name][1]!r} does not import: {error}"
                ) from error
            raise
