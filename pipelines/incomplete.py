"""The error of a specification that could not be checked to the end; light, because the console imports it always."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from buffer_engine.errors import ConfigError, Problem


class SpecificationError(ConfigError):
    """Everything wrong with a specification.

    Attributes:
        unchecked: one line about what could not be looked at before the problems are mended; empty: nothing.
    """

    def __init__(self, problems: Iterable[Problem], *, file: Path | None = None, unchecked: str = "") -> None:
        super().__init__(problems, file=file)
        self.unchecked = unchecked
