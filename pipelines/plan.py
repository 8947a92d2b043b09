"""From a specification to a plan: what will run, known to fit together before anything runs.

`build_plan` is for a specification that loaded; `check_file` reads the file too and reports the problems of both steps
together. Neither loads a model, imports torch or makes a folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import polars as pl

from buffer_engine.errors import ConfigError, MissingExtraError, Problem, did_you_mean
from operators.base import OperatorConfig, ScoreOperatorConfig
from operators.frame import FRAME_COLUMNS
from operators.plan import OperatorPlan, compile_operators
from operators.registry import OPERATORS
from pipelines.cross_checks import Findings, algorithm_needs, check_sections, import_columns, importable, task_columns
from pipelines.load import Draft, LoadedSpec, hash_of, loaded, ordered, plain, read_draft
from pipelines.spec import EvaluateSection, Spec
from pipelines.summary import summarise


@dataclass(frozen=True, slots=True)
class Plan:
    """A specification that can run.

    Attributes:
        spec: the specification; secrets are still `${env:NAME}`.
        config_hash: digest of the resolved specification without the store's path.
        operators: the operators, compiled.
        task_columns: info keys of the tasks and their types, which operators read as columns.
        warnings: what is allowed but seldom meant.
        summary: what will happen, for a person.
    """

    spec: Spec
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
    return _plan(specification.draft)


def check_file(path: Path | str, *, overrides: Sequence[str] = ()) -> Plan:
    """Read and check a specification, reporting every problem of the file and between its sections at once.

    Raises:
        ConfigError: with every problem found.
        MissingExtraError: nothing is wrong, but an operator or task set needs a package that is not installed.
    """
    return _plan(read_draft(path, overrides=overrides))


def all_problems(draft: Draft) -> tuple[Problem, ...]:
    """Problems of a draft and of what lies between its sections; empty when it can be planned."""
    try:
        _plan(draft)
    except ConfigError as error:
        return error.problems
    return ()


def _plan(draft: Draft) -> Plan:
    found = Findings(draft)
    spec = draft.spec
    if spec is None:
        raise ConfigError(draft.problems, file=draft.file)
    check_sections(spec, found)
    columns = task_columns(spec, found)
    imported = _polars_types(import_columns(spec, found))
    types = imported | _polars_types(columns.get(spec.explorer.tasks, {}) if spec.explorer is not None else {})
    unknown = spec.explorer is not None and spec.explorer.tasks not in columns
    operators = _operators(spec, types, found, columns_unknown=unknown)
    _reward(spec, found)
    if spec.loop.evaluate is not None:
        _evaluation(spec, spec.loop.evaluate, operators, types, columns, found)
    problems = ordered([*draft.problems, *found.problems])
    if problems:
        raise ConfigError(ordered([*problems, *found.extras]), file=draft.file)
    if found.extras:
        raise MissingExtraError("\n".join(problem.render(draft.file) for problem in ordered(found.extras)))
    if operators is None:  # compiling fails only with problems
        raise AssertionError("no operator plan and no problem")
    return Plan(
        spec=loaded(draft).spec,
        config_hash=hash_of(plain(spec)),
        operators=operators,
        task_columns=types,
        warnings=ordered(found.warnings),
        summary=summarise(spec, operators),
    )


def _polars_types(columns: Mapping[str, str]) -> dict[str, pl.DataType]:
    return {name: getattr(pl, kind)() for name, kind in columns.items()}


def _operators(
    spec: Spec, types: Mapping[str, pl.DataType], found: Findings, *, columns_unknown: bool
) -> OperatorPlan | None:
    """The compiled operators; None when there are problems, which are in `found`."""
    removed = _removed(found.draft)
    stored, rewarded = _workflow_scores(spec)
    try:
        return compile_operators(
            cast("Sequence[OperatorConfig]", spec.operators),
            available=types,
            components=[*stored, *(name for name in removed if name not in FRAME_COLUMNS)],
            has_reward=bool(removed) or rewarded,
        )
    except ConfigError as error:
        for problem in error.problems:
            _report(problem, found, columns_unknown=columns_unknown)
    return None


def _report(problem: Problem, found: Findings, *, columns_unknown: bool) -> None:
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
    elif not (columns_unknown and "which nothing provides" in message):
        # Without the task set's columns nobody can say what is missing; that they are unknown is reported already.
        found.problems.append(placed)


def _is_missing_package(draft: Draft, path: tuple[str | int, ...]) -> bool:
    """Whether a problem at `operators.N.type` is about a package: the type itself was found before compiling."""
    if draft.spec is None or len(path) != 3 or path[2] != "type" or not isinstance(path[1], int):
        return False
    config = cast("OperatorConfig", draft.spec.operators[draft.operators.index(path[1])])
    return any(not importable(module) for module, _ in OPERATORS.load(config.type).requires)


def _removed(draft: Draft) -> list[str]:
    """Ids of operators that are written but not valid: later operators may well read what they would have scored."""
    written = draft.data.get("operators")
    if not isinstance(written, list):
        return []
    names: list[str] = []
    for position, item in enumerate(cast("list[Any]", written)):
        if position not in draft.operators:
            entry = cast("Mapping[str, Any]", item) if isinstance(item, Mapping) else {}
            names.append(str(entry.get("id") or entry.get("type") or "unknown"))
    return names


def _workflow_scores(spec: Spec) -> tuple[tuple[str, ...], bool]:
    """Components that the workflow is said to give, and whether rows may come with a reward from it.

    Shipped workflows give no scores of their own accord; what a plug-in's workflow gives is not known here, so it gets
    the benefit of the doubt.
    """
    if spec.explorer is None:
        return (), False
    workflow = spec.explorer.workflow
    weights = workflow.score_weights
    return tuple(weights), "." in workflow.type or any(
        weight != 0 and weight is not None for weight in weights.values()
    )


def _reward(spec: Spec, found: Findings) -> None:
    """An algorithm that learns from rewards needs a component that counts."""
    needs = algorithm_needs(spec)
    if (
        needs is None
        or not needs.reward
        or not found.sound("trainer.algorithm")
        or _removed(found.draft)
        or _workflow_scores(spec)[1]
    ):
        return
    if spec.explorer is None and not spec.imports:
        return  # rows of an earlier run have their scores
    if any(problem.path == "trainer.algorithm" for problem in found.problems):
        return  # the algorithm does not fit these rows at all
    scores = [config for config in spec.operators if isinstance(config, ScoreOperatorConfig)]
    if any(config.weight != 0 for config in scores):
        return
    if scores:
        names = ", ".join(repr(config.name) for config in scores)
        message = f"{needs.algorithm} needs a reward, and every score operator ({names}) has weight 0"
        found.problem(("trainer", "algorithm"), message, "give one of them a weight above 0")
    else:
        found.problem(
            ("trainer", "algorithm"),
            f"{needs.algorithm} needs a reward, and no operator writes a score",
            "add a score operator, for example regex_or_exact_match; `buffer-engine operators` lists them",
        )


def _evaluation(
    spec: Spec,
    evaluate: EvaluateSection,
    operators: OperatorPlan | None,
    types: Mapping[str, pl.DataType],
    columns: Mapping[str, Mapping[str, str]],
    found: Findings,
) -> None:
    """Evaluation rows pass the same score operators, so their tasks need the same columns."""
    scored = [config.name for config in spec.operators if isinstance(config, ScoreOperatorConfig)]
    known = [*scored, *_workflow_scores(spec)[0], *_removed(found.draft)]
    if evaluate.solved is not None and evaluate.solved not in known:
        fix = did_you_mean(evaluate.solved, scored) if scored else "add a score operator"
        found.problem(("loop", "evaluate", "solved"), f"no operator scores {evaluate.solved!r}", fix)
    own = columns.get(evaluate.tasks)
    read = [name for name in operators.frame_columns if name in types] if operators is not None else []
    missing = [name for name in read if own is not None and name not in own]
    if missing:
        found.problem(
            ("loop", "evaluate", "tasks"),
            f"operators read {', '.join(map(repr, missing))}, which task set {evaluate.tasks!r} does not have",
            "use a task set with the same columns",
        )
