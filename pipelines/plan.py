"""From a specification to a plan: what will run, known to fit together before anything runs.

`build_plan` is for a specification that loaded; `check_file` reads the file too and reports the problems of both steps
together. Neither loads a model, imports torch or makes a folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import polars as pl

from buffer_engine.errors import ConfigError, MissingExtraError, Problem, did_you_mean
from operators.base import OperatorConfig, ScoreOperatorConfig
from operators.frame import FRAME_COLUMNS
from operators.plan import OperatorPlan, compile_operators
from operators.registry import OPERATORS
from pipelines.algorithm_checks import check_reward, workflow_scores
from pipelines.cross_checks import check_sections
from pipelines.findings import Findings, written_at
from pipelines.incomplete import SpecificationError
from pipelines.load import Draft, LoadedSpec, hash_of, loaded, ordered, plain, read_draft
from pipelines.package_checks import importable
from pipelines.source_checks import Columns, source_columns
from pipelines.spec import EvaluateSection, Spec
from pipelines.summary import summarise

_COLUMNS = "columns that operators read"


@dataclass(frozen=True, slots=True)
class Plan:
    """A specification that can run.

    Attributes:
        spec: the specification; secrets are still `${env:NAME}`.
        file: the YAML file, for messages that point into it.
        config_hash: digest of the resolved specification without the store's path.
        operators: the operators, compiled.
        task_columns: info keys of the tasks and their types, which operators read as columns.
        warnings: what is allowed but seldom meant.
        summary: what will happen, for a person.
    """

    spec: Spec
    file: Path
    config_hash: str
    operators: OperatorPlan
    task_columns: Mapping[str, pl.DataType]
    warnings: tuple[Problem, ...]
    summary: str


def build_plan(specification: LoadedSpec) -> Plan:
    """Check everything that lies between sections.

    Raises:
        ConfigError: with every problem found.
        MissingExtraError: nothing is wrong, but an operator or task set needs a package that is not installed.
    """
    return plan_of(specification.draft)


def check_file(path: Path | str, *, overrides: Sequence[str] = ()) -> Plan:
    """Read and check a specification, reporting every problem of the file and between its sections at once.

    Raises:
        ConfigError: with every problem found.
        MissingExtraError: nothing is wrong, but an operator or task set needs a package that is not installed.
    """
    return plan_of(read_draft(path, overrides=overrides))


def plan_of(draft: Draft) -> Plan:
    """The plan of a draft; raises as `check_file` does."""
    found = Findings(draft)
    spec = draft.spec
    if spec is None:
        places = list(dict.fromkeys(problem.path for problem in draft.problems))
        found.skip("whether the sections fit together", places)
        raise SpecificationError(draft.problems, file=draft.file, unchecked=found.unchecked())
    check_sections(spec, found)
    columns = source_columns(spec, found)
    chosen = written_at(draft.data, "explorer", "tasks")
    playing = columns.by_taskset.get(chosen, {}) if isinstance(chosen, str) else {}
    types = _polars_types(columns.imported) | _polars_types(playing)
    operators = _operators(spec, types, found, unknown=columns.unknown)
    check_reward(spec, found)
    if spec.loop.evaluate is not None:
        _evaluation(spec, spec.loop.evaluate, operators, types, columns, found)
    problems = ordered([*draft.problems, *found.problems])
    if problems:
        everything = ordered([*problems, *found.extras])
        raise SpecificationError(everything, file=draft.file, unchecked=found.unchecked())
    if found.extras:
        raise MissingExtraError("\n".join(problem.render(draft.file) for problem in ordered(found.extras)))
    if operators is None:  # compiling fails only with problems
        raise AssertionError("no operator plan and no problem")
    return Plan(
        spec=loaded(draft).spec,
        file=draft.file,
        config_hash=hash_of(plain(spec)),
        operators=operators,
        task_columns=types,
        warnings=ordered(found.warnings),
        summary=summarise(spec, operators),
    )


def _polars_types(columns: Mapping[str, str]) -> dict[str, pl.DataType]:
    return {name: getattr(pl, kind)() for name, kind in columns.items()}


def _operators(
    spec: Spec, types: Mapping[str, pl.DataType], found: Findings, *, unknown: Sequence[str]
) -> OperatorPlan | None:
    """The compiled operators; None when there are problems, which are in `found`."""
    removed = found.draft.removed_operators()
    stored, rewarded = workflow_scores(spec)
    try:
        return compile_operators(
            cast("Sequence[OperatorConfig]", spec.operators),
            available=types,
            components=[*stored, *(name for name in removed if name not in FRAME_COLUMNS)],
            has_reward=bool(removed) or rewarded,
        )
    except ConfigError as error:
        for problem in error.problems:
            _report(problem, found, unknown=unknown)
    return None


def _report(problem: Problem, found: Findings, *, unknown: Sequence[str]) -> None:
    """A compiler's problem, with positions as in the file."""
    positions = found.draft.operators

    def position(match: re.Match[str]) -> str:
        place = int(match.group(1))
        return f"#{positions[place]}" if place < len(positions) else match.group()

    parts = problem.path.split(".")
    path: tuple[str | int, ...] = tuple(int(part) if part.isdigit() else part for part in parts)
    if len(path) > 1 and isinstance(path[1], int) and path[1] < len(positions):
        path = ("operators", positions[path[1]], *path[2:])
    message = re.sub(r"#(\d+)", position, problem.message)
    placed = found.draft.problem(path, message, re.sub(r"#(\d+)", position, problem.fix))
    if _is_missing_package(found.draft, path):
        found.extras.append(placed)
    elif unknown and "which nothing provides" in message:
        found.skip(_COLUMNS, unknown)  # nobody can say what is missing until the sources can be read
    else:
        found.problems.append(placed)


def _is_missing_package(draft: Draft, path: tuple[str | int, ...]) -> bool:
    """Whether a problem at `operators.N.type` is about a package: the type itself was found before compiling."""
    if draft.spec is None or len(path) != 3 or path[2] != "type" or not isinstance(path[1], int):
        return False
    config = cast("OperatorConfig", draft.spec.operators[draft.operators.index(path[1])])
    return any(not importable(module) for module, _ in OPERATORS.load(config.type).requires)


def _evaluation(
    spec: Spec,
    evaluate: EvaluateSection,
    operators: OperatorPlan | None,
    types: Mapping[str, pl.DataType],
    columns: Columns,
    found: Findings,
) -> None:
    """Evaluation rows pass the same score operators, so their tasks need the same columns."""
    scored = [config.name for config in spec.operators if isinstance(config, ScoreOperatorConfig)]
    known = [*scored, *workflow_scores(spec)[0], *found.draft.removed_operators()]
    if evaluate.solved is not None and evaluate.solved not in known:
        fix = did_you_mean(evaluate.solved, scored) if scored else "add a score operator"
        found.problem(("loop", "evaluate", "solved"), f"no operator scores {evaluate.solved!r}", fix)
    own = columns.by_taskset.get(evaluate.tasks)
    read = [name for name in operators.frame_columns if name in types] if operators is not None else []
    missing = [name for name in read if own is not None and name not in own]
    if missing:
        found.problem(
            ("loop", "evaluate", "tasks"),
            f"operators read {', '.join(map(repr, missing))}, which task set {evaluate.tasks!r} does not have",
            "use a task set with the same columns",
        )
