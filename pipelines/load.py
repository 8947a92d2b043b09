"""From a YAML file and `--set` overrides to a specification, with every problem found in one go.

Validation stops at nothing: what is wrong is reported, taken out, and the rest is validated again, so that the checks
across sections (`pipelines.plan`) still see as much of the file as makes sense.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from ruamel.yaml import YAML

from buffer_engine.errors import ConfigError, Problem
from buffer_engine.identity import stable_digest
from pipelines.overrides import Overridden, apply_overrides
from pipelines.problems import Complaint, complaints, conversions
from pipelines.secrets import secret_problems
from pipelines.spec import Spec
from pipelines.yaml_text import Document, PathParts, dotted, read_document

_STAND_INS: Mapping[str, Any] = {"version": 1, "name": "unnamed", "store": {"path": "runs/unnamed"}}
"""What takes the place of a missing or wrong required section while the rest is checked; never part of a result."""

_MAX_ROUNDS = 20

SAVED_MARK = "# configuration hash: "
"""How the specification begins that is saved with a run."""


@dataclass(frozen=True, slots=True)
class LoadedSpec:
    """A valid specification and where it came from.

    Attributes:
        spec: the specification; secrets are still `${env:NAME}`.
        file: the YAML file.
        lines: dotted path → line in the file.
        text: the file as read, without overrides.
        resolved: plain data of the specification with every default filled in; what is saved with a run.
        config_hash: digest of `resolved` without the store's path; equal for equal experiments.
        draft: the reading it came from, for messages that point into the file.
    """

    spec: Spec
    file: Path
    lines: Mapping[str, int]
    text: str
    resolved: dict[str, Any]
    config_hash: str
    draft: Draft = field(repr=False)


@dataclass(frozen=True, slots=True)
class Draft:
    """A file as far as it can be understood.

    Attributes:
        problems: what `load_spec` would raise; empty for a valid file.
        spec: the specification without the parts that are wrong; None when too much is.
        data: the data as written, overrides applied, before anything was taken out.
        operators: position in the file of each operator of `spec`.
    """

    file: Path
    document: Document
    data: Mapping[str, Any]
    overridden: Overridden
    problems: tuple[Problem, ...]
    spec: Spec | None
    operators: tuple[int, ...]

    def names(self, section: str) -> tuple[str, ...]:
        """Names written under `models`, `tasks` or `imports`, whether or not what they name is valid."""
        written = self.data.get(section)
        return tuple(cast("Mapping[str, Any]", written)) if isinstance(written, Mapping) else ()

    @property
    def is_saved(self) -> bool:
        """Whether this is the specification saved with a run, in which every default is written out."""
        return self.document.text.startswith(SAVED_MARK)

    def removed_operators(self) -> list[str]:
        """Ids of operators that are written but not valid: later ones may read what they would have scored."""
        written = self.data.get("operators")
        if not isinstance(written, list):
            return []
        names: list[str] = []
        for position, item in enumerate(cast("list[Any]", written)):
            if position not in self.operators:
                entry = cast("Mapping[str, Any]", item) if isinstance(item, Mapping) else {}
                names.append(str(entry.get("id") or entry.get("type") or "unknown"))
        return names

    def problem(self, path: PathParts, message: str, fix: str = "") -> Problem:
        """A problem at `path`, with its line, or the override that gave the value."""
        source = self.overridden.source(path, written=dotted(path) in self.document.lines)
        if source is not None:
            return Problem(f"{message} (from --set {source})", path=dotted(path), fix=fix)
        return Problem(message, path=dotted(path), fix=fix, line=line_of(self.document.lines, path))


def line_of(lines: Mapping[str, int], path: PathParts) -> int | None:
    """The line of `path`, or of the nearest place above it that the file has."""
    for length in range(len(path), -1, -1):
        line = lines.get(dotted(path[:length]))
        if line is not None:
            return line
    return None


def load_spec(path: Path | str, *, overrides: Sequence[str] = ()) -> LoadedSpec:
    """Read and validate a specification; a valid one is checked across sections by `pipelines.plan.build_plan`.

    Raises:
        ConfigError: the file or an override is wrong; with every problem, those between sections too.
    """
    draft = read_draft(path, overrides=overrides)
    if draft.problems:
        from pipelines.plan import plan_of  # which reads drafts, so it cannot be imported above

        plan_of(draft)
    return loaded(draft)


def loaded(draft: Draft) -> LoadedSpec:
    """The result for a draft without problems.

    Raises:
        ConfigError: it has problems.
    """
    if draft.problems or draft.spec is None:
        raise ConfigError(draft.problems, file=draft.file)
    resolved = plain(draft.spec)
    return LoadedSpec(
        spec=draft.spec,
        file=draft.file,
        lines=draft.document.lines,
        text=draft.document.text,
        resolved=resolved,
        config_hash=hash_of(resolved),
        draft=draft,
    )


def read_draft(path: Path | str, *, overrides: Sequence[str] = ()) -> Draft:
    """Read as much as can be understood.

    Raises:
        ConfigError: the file is no YAML mapping at all. What is wrong inside one is in the draft's problems.
    """
    file = Path(path)
    document = read_document(file)
    overridden = apply_overrides(document.data, overrides)
    draft = Draft(file, document, overridden.data, overridden, (), None, ())
    found, spec, operators = _validate(overridden.data)
    problems = [*document.problems, *overridden.problems]
    unreadable = {problem.path for problem in document.problems}
    problems += [
        draft.problem(complaint.path, complaint.message, complaint.fix)
        for complaint in found
        if dotted(complaint.path) not in unreadable  # what stands in for it there was not written
    ]
    problems += [draft.problem(path, problem.message, problem.fix) for path, problem in secret_problems(draft.data)]
    return Draft(file, document, draft.data, overridden, ordered(problems), spec, operators)


def ordered(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Problems without repeats, by line; those without a line come first."""
    return tuple(sorted(dict.fromkeys(problems), key=lambda problem: problem.line or 0))


def _validate(data: Mapping[str, Any]) -> tuple[list[Complaint], Spec | None, tuple[int, ...]]:
    """Complaints, the specification of what remains, and the original positions of its operators."""
    found = {complaint.path: complaint for complaint in conversions(Spec, data)}
    rest: dict[str, Any] = copy.deepcopy(dict(data))
    written = rest.get("operators")
    positions = tuple(range(len(cast("list[Any]", written)))) if isinstance(written, list) else ()
    gone: set[PathParts] = set()
    for _ in range(_MAX_ROUNDS):
        try:
            return list(found.values()), Spec.model_validate(rest), positions
        except ValidationError as error:
            fresh = complaints(Spec, rest, error)
        except ConfigError as error:  # a plug-in that does not import
            return [*found.values(), *(Complaint((), item.message, item.fix, ()) for item in error.problems)], None, ()
        for complaint in fresh:
            original = _original(complaint, positions)
            # What a section says about itself after a part of it was taken out is not what the person wrote.
            follows = any(place[: len(original.path)] == original.path for place in gone)
            if not follows and original.path not in found and not _is_stand_in(rest, complaint):
                found[original.path] = original
        gone.update(_at_origin(complaint.removes, positions) for complaint in fresh)
        positions = _remove(rest, [complaint.removes for complaint in fresh], positions)
    return list(found.values()), None, ()


def _original(complaint: Complaint, positions: tuple[int, ...]) -> Complaint:
    """The complaint with the operator's position in the file, not among those left."""
    return Complaint(_at_origin(complaint.path, positions), complaint.message, complaint.fix, complaint.removes)


def _at_origin(path: PathParts, positions: tuple[int, ...]) -> PathParts:
    if len(path) > 1 and path[0] == "operators" and isinstance(path[1], int):
        return ("operators", positions[path[1]], *path[2:])
    return path


def _is_stand_in(rest: Mapping[str, Any], complaint: Complaint) -> bool:
    key = complaint.path[0] if complaint.path else None
    return isinstance(key, str) and key in _STAND_INS and rest.get(key) is _STAND_INS[key]


def _remove(rest: dict[str, Any], places: Sequence[PathParts], positions: tuple[int, ...]) -> tuple[int, ...]:
    """Take `places` out of `rest`, list items last to first; wrong required sections become stand-ins."""
    gone = set(positions)
    for place in sorted(set(places), key=_later_items_first):
        if len(place) <= 1:
            key = place[0] if place else None
            if isinstance(key, str):
                rest.pop(key, None)
            for name, value in _STAND_INS.items():
                if name not in rest:
                    rest[name] = value
            continue
        here: Any = rest
        for part in place[:-1]:
            here = here[part] if _has(here, part) else None
        if _has(here, place[-1]):
            del here[place[-1]]
            if place[0] == "operators" and len(place) == 2:
                gone.discard(positions[cast("int", place[1])])
    return tuple(position for position in positions if position in gone)


def _has(here: Any, part: str | int) -> bool:
    if isinstance(here, dict):
        return part in here
    return isinstance(here, list) and isinstance(part, int) and part < len(cast("list[Any]", here))


def _later_items_first(place: PathParts) -> tuple[tuple[int, str], ...]:
    return tuple((-part, "") if isinstance(part, int) else (0, part) for part in place)


def plain(spec: Spec) -> dict[str, Any]:
    """The specification as plain data, defaults included, secrets as `${env:NAME}`."""
    return spec.model_dump(mode="json")


def hash_of(resolved: Mapping[str, Any]) -> str:
    """Digest of a resolved specification; where the store lies and how a run is reported change nothing in it."""
    return stable_digest({key: value for key, value in resolved.items() if key not in ("store", "report")})


def resolved_yaml(spec: Spec) -> str:
    """The full specification as YAML, every default written out; loading it gives the same specification."""
    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    writer.width = 120
    stream = io.StringIO()
    writer.dump(plain(spec), stream)
    return stream.getvalue()
