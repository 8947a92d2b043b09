"""What the checks between sections found: problems, warnings, and what could not be looked at yet.

A *problem* would make the run fail or mean something else than written; a *warning* is for what is allowed but seldom
meant. Checks ask `sound` before they judge, so that a value which only stands in for a wrong one is never blamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from buffer_engine.errors import BufferEngineError, ConfigError, MissingExtraError, Problem
from pipelines.load import Draft
from pipelines.yaml_text import PathParts

_SHOWN_REASONS = 3


@dataclass(slots=True)
class Findings:
    """Problems and warnings found so far, each placed in the file."""

    draft: Draft
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    extras: list[Problem] = field(default_factory=list)
    """Optional packages without which not even the plan can be made."""
    skipped: dict[str, dict[str, None]] = field(default_factory=dict)
    """What was not looked at → the places whose problems prevented it, in order."""

    def sound(self, *paths: str) -> bool:
        """Whether the file has no problem at, above or below these places: what stands there is what was meant."""
        return not self.unsound(*paths)

    def unsound(self, *paths: str) -> list[str]:
        """Places of the problems at, above or below `paths`; a misspelt section counts for the one that was meant."""
        wrong = list(dict.fromkeys(problem.path for problem in self.draft.problems))
        found: dict[str, None] = {}
        for path in paths:
            section = path.partition(".")[0]
            near = [bad for bad in wrong if bad == path or bad.startswith(f"{path}.") or path.startswith(f"{bad}.")]
            if not near and self._is_lost(section):
                near = [bad for bad in wrong if bad.startswith(f"{section}.")]
            if section not in self.draft.data:
                near += [bad for bad in wrong if "." not in bad and get_close_matches(bad, [section], cutoff=0.55)]
            found.update(dict.fromkeys(near))
        return list(found)

    def _is_lost(self, section: str) -> bool:
        """Whether a section was written and nothing of it could be kept."""
        return self.draft.data.get(section) is not None and getattr(self.draft.spec, section, None) is None

    def skip(self, what: str, reasons: Iterable[str]) -> None:
        """Note that `what` was not checked, because of problems at `reasons`; no reasons, nothing to note."""
        for reason in reasons:
            self.skipped.setdefault(what, {})[reason] = None

    def unchecked(self) -> str:
        """One line about everything skipped; empty when nothing was."""
        by_reasons: dict[tuple[str, ...], list[str]] = {}
        for what, reasons in self.skipped.items():
            by_reasons.setdefault(tuple(reasons), []).append(what)
        return "; ".join(f"{_listed(whats)}, because {_have_problems(places)}" for places, whats in by_reasons.items())

    def problem(self, path: PathParts, message: str, fix: str = "") -> None:
        """Add a problem at `path`."""
        self.problems.append(self.draft.problem(path, message, fix))

    def warn(self, path: PathParts, message: str, fix: str = "") -> None:
        """Add a warning at `path`."""
        self.warnings.append(self.draft.problem(path, message, fix))

    def error(self, path: PathParts, error: BufferEngineError) -> None:
        """Add what another module raised."""
        if isinstance(error, ConfigError):
            for item in error.problems:
                self.problem(path, item.message, item.fix)
            return
        message, _, fix = str(error).partition(" → ")
        if isinstance(error, MissingExtraError):
            self.extras.append(self.draft.problem(path, message, fix))
        else:
            self.problem(path, message, fix)


def written_at(data: Mapping[str, Any], *path: str) -> object:
    """What a person wrote at a path of keys, valid or not; None when nothing stands there."""
    here: Any = data
    for key in path:
        here = here.get(key) if isinstance(here, Mapping) else None
    return here


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def as_written(value: float) -> str:
    """A number as a person would write it: every digit it has, and no `.0`."""
    return repr(float(value)).removesuffix(".0")


def _have_problems(places: Sequence[str]) -> str:
    shown = [place or "the file" for place in places[:_SHOWN_REASONS]]
    if len(places) > len(shown):
        shown.append(f"{len(places) - len(shown)} more")
    return f"{_listed(shown)} {'has' if len(places) == 1 else 'have'} problems"


def _listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
