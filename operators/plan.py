"""From a list of configurations to a plan that is known to fit together, or all the reasons why it does not.

Nothing is read and nothing heavy is imported: columns are followed from operator to operator by name and type, and
whatever is a Polars expression is run once on a frame without rows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import polars as pl
import xxhash

from buffer_engine.errors import ConfigError, Problem, did_you_mean
from buffer_engine.identity import stable_digest
from operators.base import Context, Contract, Operator, OperatorConfig, ScoreOperatorConfig
from operators.checking import check_result
from operators.expressions import roots, row_expression
from operators.frame import ALWAYS, FRAME_COLUMNS, info_dtype
from operators.guard import describe
from operators.registry import OPERATORS

RESERVED_IDS = ("pipeline", "intake", "reader")
"""Names that decisions use for something else than an operator."""


@dataclass(frozen=True, slots=True)
class PlannedOperator:
    """One operator in its place.

    Attributes:
        position: 0-based place in the list.
        where: condition on rows; None: all.
        weight: weight of the component it writes; None when it writes none.
        fingerprint: hash of class, version and parameters; equal fingerprints mean equal verdicts.
    """

    position: int
    id: str
    type: str
    operator: Operator[Any]
    contract: Contract
    where: pl.Expr | None
    weight: float | None
    fingerprint: str


@dataclass(frozen=True, slots=True)
class OperatorPlan:
    """Operators that fit together, top to bottom.

    Attributes:
        frame_columns: what `build_frame` must make: frame columns, info keys and stored components that are read.
        info_columns: the declared types of all task info keys.
    """

    steps: tuple[PlannedOperator, ...]
    frame_columns: tuple[str, ...]
    info_columns: Mapping[str, pl.DataType] = field(default_factory=dict)

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids in order."""
        return tuple(step.id for step in self.steps)

    @property
    def components(self) -> tuple[str, ...]:
        """Components that the plan writes, in order."""
        return tuple(name for step in self.steps for name in step.contract.scores)

    @property
    def fingerprint(self) -> str:
        """Hash of all operators in order."""
        return stable_digest([[step.id, step.fingerprint] for step in self.steps])

    def close(self) -> None:
        """Free what the operators set up (worker processes)."""
        for step in self.steps:
            step.operator.close()

    def __enter__(self) -> OperatorPlan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def compile_operators(
    configs: Sequence[OperatorConfig],
    *,
    available: Mapping[str, pl.DataType],
    components: Collection[str] = (),
    has_reward: bool = False,
    path: str = "operators",
) -> OperatorPlan:
    """Check a pipeline without data.

    Args:
        configs: the operators, top to bottom, each of its own configuration class.
        available: task info keys and their types (`TaskSet.columns`); `Object` arrives as JSON text.
        components: score components that the rows may already have (a workflow's scores, earlier passes).
        has_reward: whether rows come with a reward (a component with a weight) before any operator runs.
        path: where the list stands in the configuration, for messages.
    Raises:
        ConfigError: every problem found, each with its path and, where one is known, the fix.
    """
    return _Compiler(configs, available, components, has_reward, path).compile()


def fingerprint(operator: Operator[Any]) -> str:
    """Hash of an operator's class, version and parameters, and of the files it reads; its id does not count.

    Raises:
        OSError: a file cannot be read.
    """
    kind = type(operator)
    parameters = operator.config.model_dump(mode="json", exclude={"id"})
    contents = [xxhash.xxh3_128_hexdigest(file.read_bytes()) for file in operator.files()]
    return stable_digest(f"{kind.__module__}:{kind.__qualname__}", kind.version, parameters, *contents)


class _Compiler:
    def __init__(
        self,
        configs: Sequence[OperatorConfig],
        available: Mapping[str, pl.DataType],
        components: Collection[str],
        has_reward: bool,
        path: str,
    ) -> None:
        self._configs = configs
        self._info = dict(available)
        self._ids = {config.name for config in configs}
        self._path = path
        self._problems: list[Problem] = []
        self._types: dict[str, pl.DataType] = {name: pl.Float64() for name in components}
        self._types |= {name: info_dtype(dtype) for name, dtype in available.items()}
        self._types |= {name: column.dtype for name, column in FRAME_COLUMNS.items()}
        self._given = frozenset(self._types)
        self._written: set[str] = set()
        self._read: set[str] = set()
        self._has_reward = has_reward
        self._shaped_by: str | None = None

    def compile(self) -> OperatorPlan:
        self._check_ids()
        operators = [self._make(place, config) for place, config in enumerate(self._configs)]
        contracts = [None if operator is None else operator.contract() for operator in operators]
        steps: list[PlannedOperator] = []
        for place, (config, operator, contract) in enumerate(zip(self._configs, operators, contracts, strict=True)):
            if operator is not None and contract is not None:
                steps.append(self._place(place, config, operator, contract, contracts))
        if self._problems:
            raise ConfigError(self._problems)
        columns = dict.fromkeys((*ALWAYS, "error", *sorted(self._read)))
        return OperatorPlan(tuple(steps), tuple(columns), self._info)

    def _report(self, message: str, place: int, name: str = "", fix: str = "") -> None:
        where = ".".join(part for part in (self._path, str(place), name) if part)
        self._problems.append(Problem(message, path=where, fix=fix))

    def _check_ids(self) -> None:
        seen: dict[str, int] = {}
        for place, config in enumerate(self._configs):
            name = config.name
            if name in seen:
                fix = "give one of them an `id` of its own"
                self._report(f"operators #{seen[name]} and #{place} have the same id {name!r}", place, "id", fix)
            elif name in RESERVED_IDS:
                self._report(f"the id {name!r} is reserved for decisions that no operator takes", place, "id")
            elif name in FRAME_COLUMNS:
                self._report(f"the id {name!r} is the name of a frame column", place, "id", "choose another id")
            elif name in self._info and isinstance(config, ScoreOperatorConfig):
                self._report(f"the id {name!r} is also an info key of the tasks", place, "id", "choose another id")
            seen.setdefault(name, place)

    def _make(self, place: int, config: OperatorConfig) -> Operator[Any] | None:
        try:
            operator_class: type[Operator[Any]] = OPERATORS.load(config.type)
        except ConfigError as error:
            for problem in error.problems:
                self._report(problem.message, place, "type", problem.fix)
            return None
        for module, extra in operator_class.requires:
            if importlib.util.find_spec(module.partition(".")[0]) is None:
                self._report(
                    f"operator {config.name!r} needs the package {module!r}, which is not installed",
                    place,
                    "type",
                    f"pip install 'buffer-engine[{extra}]'",
                )
        if not isinstance(config, operator_class.Config):
            expected = operator_class.Config.__name__
            self._report(f"operator {config.name!r} is configured by {type(config).__name__}, not {expected}", place)
            return None
        operator = operator_class(config)
        missing = [file for file in operator.files() if not file.is_file()]
        for file in missing:
            entry = _entry_of(config, str(file))
            self._report(f"operator {config.name!r} reads the file {str(file)!r}, which is not there", place, entry)
        return None if missing else operator

    def _place(
        self,
        place: int,
        config: OperatorConfig,
        operator: Operator[Any],
        contract: Contract,
        contracts: Sequence[Contract | None],
    ) -> PlannedOperator:
        where = self._where(place, config, contracts)
        known = [self._has(place, config, name, contracts, "") for name in sorted(contract.reads)]
        self._check_group(place, config, contract)
        if all(known) and self._check_promises(place, config, contract):
            self._try(place, operator, contract)
        self._follow(config, contract)
        return PlannedOperator(
            position=place,
            id=config.name,
            type=config.type,
            operator=operator,
            contract=contract,
            where=where,
            weight=config.weight if isinstance(config, ScoreOperatorConfig) and contract.scores else None,
            fingerprint=fingerprint(operator),
        )

    def _where(self, place: int, config: OperatorConfig, contracts: Sequence[Contract | None]) -> pl.Expr | None:
        if config.where is None:
            return None
        try:
            condition = row_expression(config.where)
        except ValueError as error:
            self._report(f"`where` {config.where!r}: {error}", place, "where")
            return None
        names = sorted(roots(condition))
        known = [self._has(place, config, name, contracts, "where") for name in names]
        if all(known):
            try:
                dtype = self._empty(names).with_columns(condition.alias("where"))["where"].dtype
            except pl.exceptions.PolarsError as error:
                self._report(f"`where` {config.where!r} does not fit the columns: {_first_line(error)}", place, "where")
            else:
                if not (dtype == pl.Boolean or dtype == pl.Null):
                    self._report(f"`where` {config.where!r} gives {dtype}, not true or false", place, "where")
        return condition

    def _has(
        self, place: int, config: OperatorConfig, name: str, contracts: Sequence[Contract | None], entry: str
    ) -> bool:
        """Whether `name` exists before operator `place`; otherwise a problem is reported."""
        label = f"operator #{place} {config.name!r} reads {name!r}"
        entry = entry or _entry_of(config, name)
        if name == "reward":
            later = [at for at in range(place, len(contracts)) if at != place and self._gives_reward(at, contracts[at])]
            if not self._has_reward:
                self._report(f"{label}, but nothing before it gives a reward", place, entry, self._move_up(later))
                return False
        elif name not in self._types or self._comes_later(place, name, contracts):
            later = [at for at in range(place + 1, len(contracts)) if _makes(contracts[at], name)]
            missing = "which nothing before it writes" if later else "which nothing provides"
            hint = self._move_up(later) if later else did_you_mean(name, self._types)
            self._report(f"{label}, {missing}", place, entry, hint)
            return False
        if name in self._given and name not in self._written and name != "alive":
            self._read.add(name)
        return True

    def _comes_later(self, place: int, name: str, contracts: Sequence[Contract | None]) -> bool:
        """Whether `name` is a component that an operator from `place` on writes: hidden until then."""
        if name in FRAME_COLUMNS or name in self._info or name in self._written:
            return False
        return any(contract is not None and name in contract.scores for contract in contracts[place:])

    def _move_up(self, later: Sequence[int]) -> str:
        return f"operator #{later[0]} {self._configs[later[0]].name!r} does: move it up" if later else ""

    def _gives_reward(self, place: int, contract: Contract | None) -> bool:
        config = self._configs[place]
        return bool(contract and contract.scores and isinstance(config, ScoreOperatorConfig) and config.weight != 0)

    def _check_group(self, place: int, config: OperatorConfig, contract: Contract) -> None:
        if contract.scope == "group" and contract.drops and "reward" in contract.reads and self._shaped_by is not None:
            self._report(
                f"operator #{place} {config.name!r} drops groups by 'reward', which {self._shaped_by} shapes: "
                "a length bonus would keep a group alive in which every answer is wrong",
                place,
                _entry_of(config, "reward"),
                f"move it above {self._shaped_by}, or set its column to a measured component",
            )

    def _check_promises(self, place: int, config: OperatorConfig, contract: Contract) -> bool:
        before = len(self._problems)
        for name in contract.scores:
            if name != config.name and not name.startswith(f"{config.name}_"):
                self._report(
                    f"operator {config.name!r} scores {name!r}; a component is named by its operator's id, a metric "
                    f"beside it begins with {config.name}_",
                    place,
                )
            elif name != config.name and (name in self._given or name in self._written or name in self._ids):
                fix = f"give operator #{place} another id"
                self._report(f"operator {config.name!r} scores {name!r}, a name that is taken", place, "id", fix)
            if not isinstance(config, ScoreOperatorConfig):
                self._report(f"operator {config.name!r} scores, but its configuration has no `weight`", place)
        for name, dtype in contract.writes.items():
            if name in ("experience_id", "group_id", "task_id", "reward", "alive", "error"):
                self._report(f"operator {config.name!r} writes {name!r}, which belongs to the engine", place)
            elif name in self._types and self._types[name] != dtype:
                self._report(
                    f"operator {config.name!r} replaces {name!r} ({self._types[name]}) by {dtype}; "
                    "a column keeps its type",
                    place,
                )
        return len(self._problems) == before

    def _empty(self, names: Collection[str]) -> pl.DataFrame:
        return pl.DataFrame(schema={name: self._types[name] for name in dict.fromkeys((*ALWAYS, *names))})

    def _try(self, place: int, operator: Operator[Any], contract: Contract) -> None:
        """Run an expression operator on no rows: wrong types show without data."""
        if contract.cost != "expression":
            return
        frame = self._empty(sorted(contract.reads))
        name = operator.config.name
        try:
            result = operator.apply(frame, Context(seed=0, model_version=0, step=0))
            check_result(name, contract, frame, result)
        except Exception as error:  # noqa: BLE001 - whatever it raises is a finding about the configuration
            types = ", ".join(f"{column}: {frame.schema[column]}" for column in sorted(contract.reads))
            text = _first_line(error)
            self._report(f"operator #{place} {name!r} does not fit its columns ({types}): {text}", place)

    def _follow(self, config: OperatorConfig, contract: Contract) -> None:
        """Take note of what exists after the operator."""
        self._types |= contract.writes
        hidden = {*FRAME_COLUMNS, *self._info}  # such an id was reported; its score must not cause further findings
        self._types |= {name: pl.Float64() for name in contract.scores if name not in hidden}
        self._written |= {*contract.writes, *contract.scores}
        if contract.scores and isinstance(config, ScoreOperatorConfig) and config.weight != 0:
            self._has_reward = True
            if contract.shapes:
                self._shaped_by = repr(config.name)


def _makes(contract: Contract | None, name: str) -> bool:
    return contract is not None and (name in contract.writes or name in contract.scores)


def _entry_of(config: OperatorConfig, name: str) -> str:
    """The field of a configuration in which a column is named: equal to it, a list with it, or a text that has it."""
    entries = {entry: getattr(config, entry) for entry in type(config).model_fields if entry not in ("type", "id")}
    exact = [entry for entry, value in entries.items() if value == name]
    listed = [entry for entry, value in entries.items() if isinstance(value, tuple) and name in value]
    within = [entry for entry, value in entries.items() if isinstance(value, str) and name in value]
    found = [*exact, *listed, *within]
    return found[0] if found else ""


def _first_line(error: BaseException) -> str:
    return describe(error).split("\n", 1)[0]
