"""The word after `--only`."""

from __future__ import annotations

from typing import cast, get_args

from buffer_engine.errors import UsageError, did_you_mean
from pipelines.assemble import ALL_PARTS, Part


def chosen_parts(only: str | None) -> tuple[Part, ...]:
    """The stages to do: all, or the named one.

    Raises:
        UsageError: the word is none of the stages.
    """
    if only is None:
        return ALL_PARTS
    names: tuple[str, ...] = get_args(Part)
    if only not in names:
        raise UsageError(f"--only {only!r} is no stage → {did_you_mean(only, names)}")
    return (cast("Part", only),)
