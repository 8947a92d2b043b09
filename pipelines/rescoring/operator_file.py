"""The operators that score stored rows again: a YAML file, checked against what the store's rows have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import polars as pl
import pyarrow as pa
from pydantic import ValidationError

from buffer_engine.config import ComponentConfig
from buffer_engine.errors import ConfigError, Problem
from operators.base import OperatorConfig
from operators.frame import FRAME_COLUMNS
from operators.plan import OperatorPlan, compile_operators
from pipelines.problems import complaints
from pipelines.spec import OperatorEntry
from pipelines.yaml_text import Document, PathParts, dotted, read_document


class _OperatorList(ComponentConfig):
    """A file with several operators; those before the score operator derive columns for it."""

    operators: tuple[OperatorEntry, ...]


def read_operators(file: Path, *, component: str | None = None) -> tuple[OperatorConfig, ...]:
    """The operators of a file: one `{type: …}`, or a list under `operators:`.

    Args:
        component: name of the component that the last operator writes, in place of its id; None: its id.

    Raises:
        ConfigError: the file is missing or wrong; with the line of every problem.
    """
    document = read_document(file)
    single = "operators" not in document.data
    data: Mapping[str, Any] = {"operators": [document.data]} if single else document.data
    if document.problems:
        raise ConfigError(document.problems, file=file)
    try:
        entries = _OperatorList.model_validate(data).operators
    except ValidationError as error:
        found = [
            _problem(document, complaint.path, complaint.message, complaint.fix, single=single)
            for complaint in complaints(_OperatorList, data, error)
        ]
        raise ConfigError(found, file=file) from error
    configs = cast("tuple[OperatorConfig, ...]", entries)
    if not configs:
        raise ConfigError([Problem("there is no operator in it", path="operators")], file=file)
    if component is None:
        return configs
    try:
        last = type(configs[-1]).model_validate(configs[-1].model_dump(exclude_unset=True) | {"id": component})
    except ValidationError as error:
        raise ConfigError(
            [Problem(f"{component!r} cannot name a component", fix="letters, digits and _, and no digit first")]
        ) from error
    return (*configs[:-1], last)


def _problem(document: Document, path: PathParts, message: str, fix: str, *, single: bool) -> Problem:
    shown = path[2:] if single and path[:1] == ("operators",) else path
    line = next((document.lines[dotted(shown[:end])] for end in range(len(shown), -1, -1)
                 if dotted(shown[:end]) in document.lines), None)  # fmt: skip
    return Problem(message, path=dotted(shown), fix=fix, line=line)


def compile_scoring(file: Path, configs: tuple[OperatorConfig, ...], tasks: pa.Table, scores: pa.Table) -> OperatorPlan:
    """Check the operators against the columns that stored rows have.

    Args:
        tasks: rows of `schema.TASKS` whose info keys are columns; see `info_columns`.
        scores: columns name and weight of the stored scores, whose components are columns.

    Raises:
        ConfigError: a column is missing, an operator rejects, masks or adds rows, or none or several of them score.
    """
    kinds = pl.DataFrame(pl.from_arrow(scores.select(["name", "weight"]))).unique()
    try:
        plan = compile_operators(
            configs,
            available=info_columns(tasks),
            components=kinds["name"].unique().sort().to_list(),
            has_reward=bool(kinds.filter(pl.col("weight").fill_null(0) != 0).height),
        )
    except ConfigError as error:
        raise ConfigError(error.problems, file=file) from error
    problems: list[Problem] = []
    for step in plan.steps:
        contract = step.contract
        doors = [name for name in ("drops", "holds", "masks", "adds") if getattr(contract, name)]
        if doors:
            problems.append(
                Problem(
                    f"operator {step.id!r} {' and '.join(doors)} rows, and scoring again judges none",
                    path=f"operators.{step.position}",
                    fix="curate with it instead, or configure it so that it only scores",
                )
            )
    scoring = [step.id for step in plan.steps if step.contract.scores]
    if scoring != [plan.steps[-1].id]:
        problems.append(
            Problem(
                f"{len(scoring)} of the operators score ({', '.join(scoring) or 'none'})",
                path="operators",
                fix="one score operator, the last; those before it may derive columns",
            )
        )
    if problems:
        plan.close()
        raise ConfigError(problems, file=file)
    return plan


def info_columns(tasks: pa.Table) -> dict[str, pl.DataType]:
    """Info keys of stored tasks and their types; a key of several kinds, a list or an object is its JSON text."""
    kinds: dict[str, set[type]] = {}
    # A Python loop: info objects have no common shape to decode into; distinct texts are far fewer than rollouts.
    for text in tasks.column("info_json").unique().to_pylist():
        for name, value in json.loads(text).items():
            if value is not None and name not in FRAME_COLUMNS:
                kinds.setdefault(name, set()).add(type(value))
    return {name: _column_type(found) for name, found in sorted(kinds.items())}


def _column_type(kinds: set[type]) -> pl.DataType:
    if kinds == {str}:
        return pl.String()
    if kinds == {bool}:
        return pl.Boolean()
    if kinds == {int}:
        return pl.Int64()
    return pl.Float64() if kinds <= {int, float} else pl.Object()
