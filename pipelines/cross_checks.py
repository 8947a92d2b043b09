"""Checks between sections of a specification: names, partitions, numbers that must fit, and what an algorithm needs.

Nothing here imports torch, loads a model or opens a store. Each check looks at whatever part of the specification is
valid, so one wrong section does not hide what is wrong elsewhere. A *problem* would make the run fail or mean something
else than written; a *warning* is for what is allowed but seldom meant.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from buffer_engine.config import ComponentConfig
from buffer_engine.errors import BufferEngineError, ConfigError, MissingExtraError, Problem, did_you_mean
from buffer_engine.registry import Registry
from buffer_engine.store.base import ReadPolicy
from explorers.models.weights_cache import PACKAGED, check_folder
from explorers.registry import MODELS, TASKSETS, WORKFLOWS
from explorers.tasksets.row_source import jsonl_columns, parquet_columns
from pipelines.load import Draft
from pipelines.secrets import reveal
from pipelines.spec import Spec
from pipelines.yaml_text import PathParts
from trainers.registry import ALGORITHMS, TRAINERS

_PACKAGES: Mapping[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("model", "transformers"): (("torch", "torch"), ("transformers", "torch")),
    ("trainer", "torch"): (("torch", "torch"), ("transformers", "torch")),
    ("task set", "reasoning_gym"): (("reasoning_gym", "demo"),),
}
"""(kind, type) → (module, extra) of shipped components that do not declare `requires` themselves."""


@dataclass(slots=True)
class Findings:
    """Problems and warnings found so far, each placed in the file."""

    draft: Draft
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    extras: list[Problem] = field(default_factory=list)
    """Optional packages without which not even the plan can be made."""

    def sound(self, *paths: str) -> bool:
        """Whether the file has no problem at, above or below these places: what stands there is what was meant."""
        wrong = [problem.path for problem in self.draft.problems]
        return not any(
            bad == path or bad.startswith(f"{path}.") or path.startswith(f"{bad}.") for bad in wrong for path in paths
        )

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


def check_sections(spec: Spec, found: Findings) -> None:
    """Every check that needs no operators."""
    _names(spec, found)
    _partitions(spec, found)
    _store(spec, found)
    _models(spec, found)
    _stages(spec, found)
    _numbers(spec, found)
    _extras(spec, found)


def task_columns(spec: Spec, found: Findings) -> dict[str, dict[str, str]]:
    """Info keys and type names of the task sets that the run plays, by name; a set that cannot tell is left out."""
    used = [spec.explorer.tasks] if spec.explorer is not None else []
    used += [spec.loop.evaluate.tasks] if spec.loop.evaluate is not None else []
    columns: dict[str, dict[str, str]] = {}
    for name in dict.fromkeys(used):
        config: Any = spec.tasks.get(name)
        if config is None:
            continue
        try:
            columns[name] = dict(TASKSETS.load(config.type)(reveal(config)).columns())
        except BufferEngineError as error:
            found.error(("tasks", name), error)
    return columns


def import_columns(spec: Spec, found: Findings) -> dict[str, str]:
    """Info keys and type names that imported rows bring: columns of their files that are not the dialogue itself."""
    columns: dict[str, str] = {}
    for name, source in spec.imports.items():
        path = Path(source.path).expanduser()
        if not path.is_file():
            found.problem(("imports", name, "path"), f"there is no file {path}", "paths start at the current folder")
            continue
        try:
            kinds = parquet_columns(path) if path.suffix == ".parquet" else jsonl_columns(path, skip_bad=True)
        except BufferEngineError as error:
            found.error(("imports", name, "path"), error)
            continue
        dialogue = {source.messages, source.prompt, source.response, "messages", "conversations"}
        for column, kind in kinds.items():
            if column not in dialogue:
                columns.setdefault(column, kind)
    return columns


def _names(spec: Spec, found: Findings) -> None:
    """Every name that is used must be declared; what is declared should be used."""
    references: list[tuple[PathParts, str, str]] = []
    if spec.explorer is not None:
        references.append((("explorer", "model"), "models", spec.explorer.model))
        references.append((("explorer", "tasks"), "tasks", spec.explorer.tasks))
    trained = getattr(spec.trainer, "model", None)
    if isinstance(trained, str):
        references.append((("trainer", "model"), "models", trained))
    if spec.loop.evaluate is not None:
        references.append((("loop", "evaluate", "tasks"), "tasks", spec.loop.evaluate.tasks))
    references += [(("imports", name, "model"), "models", source.model) for name, source in spec.imports.items()]
    kinds = {"models": "model", "tasks": "task set"}
    for path, section, name in references:
        declared = found.draft.names(section)
        if name not in declared:
            fix = did_you_mean(name, declared) if declared else f"declare it under `{section}:`"
            found.problem(path, f"there is no {kinds[section]} {name!r} under `{section}`", fix)
    if found.draft.problems:
        return  # a reference may stand in a part that is wrong
    for section, entries in (("models", spec.models), ("tasks", spec.tasks)):
        used = {name for _, where, name in references if where == section}
        for name in entries:
            if name not in used:
                found.warn(
                    (section, name), f"{kinds[section]} {name!r} is not used by any section", "remove it, or use it"
                )


def _partitions(spec: Spec, found: Findings) -> None:
    """Training plays `train`, evaluation plays `eval`; the two never mix."""
    uses: list[tuple[PathParts, str, str, str]] = []
    if spec.explorer is not None:
        uses.append((("explorer", "tasks"), spec.explorer.tasks, "train", "exploration makes training rows"))
    if spec.loop.evaluate is not None:
        uses.append((("loop", "evaluate", "tasks"), spec.loop.evaluate.tasks, "eval", "evaluation measures"))
    for path, name, wanted, why in uses:
        partition = getattr(spec.tasks.get(name), "partition", wanted)
        if partition == wanted:
            continue
        line = found.draft.document.lines.get(f"tasks.{name}")
        where = f" (line {line})" if line is not None else ""
        others = [other for other, config in spec.tasks.items() if getattr(config, "partition", None) == wanted]
        fix = f"use {others[0]!r}" if others else f"declare a task set with `partition: {wanted}` and use it here"
        found.problem(path, f"{why}, but task set {name!r}{where} is of partition {partition!r}, not {wanted!r}", fix)


def _store(spec: Spec, found: Findings) -> None:
    """The folder can be made and written; it is not made here."""
    folder = spec.store.path
    if folder.exists() and not folder.is_dir():
        found.problem(("store", "path"), f"{folder} is a file, not a folder", "name another folder")
        return
    nearest = next((path for path in (folder, *folder.absolute().parents) if path.exists()), None)
    if nearest is not None and not nearest.is_dir():
        found.problem(
            ("store", "path"), f"{nearest} is a file, so {folder} cannot be made in it", "name another folder"
        )
    elif nearest is not None and not os.access(nearest, os.W_OK | os.X_OK):
        found.problem(
            ("store", "path"), f"the folder {nearest} cannot be written", "change its permissions or the path"
        )


def _models(spec: Spec, found: Findings) -> None:
    """Folders of models are there and whole; a packaged model is made when first used."""
    for name, config in spec.models.items():
        path = getattr(config, "path", None)
        if not isinstance(path, (str, Path)):
            continue
        try:
            shown = str(getattr(reveal(config), "path"))  # noqa: B009 - the field exists: it was just read
            if shown not in PACKAGED:
                check_folder(Path(shown).expanduser(), shown)
        except BufferEngineError as error:
            found.error(("models", name, "path"), error)


def _stages(spec: Spec, found: Findings) -> None:
    """What the sections together mean: which stages there are, and whether rows can reach them."""
    explorer, trainer, evaluate = spec.explorer, spec.trainer, spec.loop.evaluate
    if spec.loop.mode == "async":
        found.problem(("loop", "mode"), "async exploration is not available yet", "write `mode: sync`")
    if explorer is None and not spec.imports and found.sound("explorer", "imports"):
        nothing = "no explorer and no imports: only rows already in the store are used"
        found.warn((), nothing, "add `explorer:` or `imports:`")
    if evaluate is not None and explorer is None and found.sound("explorer"):
        found.problem(
            ("loop", "evaluate"), "evaluation plays tasks and there is no explorer to play them", "add `explorer:`"
        )
    if evaluate is not None and trainer is None and found.sound("trainer"):
        found.warn(("loop", "evaluate"), "without a trainer every evaluation measures the same weights")
    used = {source.model for source in spec.imports.values()} | ({explorer.model} if explorer is not None else set())
    if len(used) > 1:
        names = ", ".join(sorted(used))
        found.problem(
            ("imports",), f"explorer and imports use different models ({names})", "one run has one tokenizer: name one"
        )
    trained = getattr(trainer, "model", None)
    if explorer is not None and trained is not None and trained != explorer.model:
        mine, other = spec.models.get(explorer.model), spec.models.get(trained)
        if mine is not None and other is not None and getattr(mine, "path", None) != getattr(other, "path", None):
            found.problem(
                ("trainer", "model"),
                f"the trainer trains {trained!r} and the explorer plays {explorer.model!r}, which are different "
                "weights: what is trained could not be given to the explorer",
                "name the same model in both",
            )
    _needs(spec, found, imported_only=explorer is None and bool(spec.imports) and found.sound("explorer"))


def _needs(spec: Spec, found: Findings, *, imported_only: bool) -> None:
    """What the algorithm needs of its rows, as far as it does not depend on operators."""
    needs = algorithm_needs(spec)
    if needs is None or not found.sound("trainer.algorithm"):
        return
    name = needs.algorithm
    at: PathParts = ("trainer", "algorithm")
    if needs.logprobs and found.sound("explorer.sampling", "trainer.temperature"):
        _distribution(spec, found, name)
    if needs.logprobs and imported_only:
        found.problem(
            at,
            f"{name} needs the log-probabilities of the model that sampled a row; imported rows have none",
            "add `explorer:`, or use an algorithm for offline rows such as sft",
        )
    elif needs.groups and imported_only:
        found.problem(at, f"{name} compares the rows of a group; imported rows have no groups", "add `explorer:`")
    if needs.groups and spec.explorer is not None and spec.explorer.group_size == 1:
        found.problem(
            ("explorer", "group_size"),
            f"{name} compares the rows of a group, and group_size is {spec.explorer.group_size}",
            "write 2 or more; 8 is usual",
        )


def _distribution(spec: Spec, found: Findings, algorithm: str) -> None:
    """The log-probs that the sampler stores are compared with the trainer's: both must be of one distribution."""
    if spec.explorer is None:
        return
    sampling, trained = spec.explorer.sampling, getattr(spec.trainer, "temperature", None)
    at: PathParts = ("explorer", "sampling")
    if sampling.temperature == 0:
        why = f"greedy sampling has no exploration, and its log-probs are raw: {algorithm} cannot learn from it"
        found.problem((*at, "temperature"), why, "write a temperature above 0; 1.0 is usual")
    elif trained is not None and trained != sampling.temperature:
        found.problem(
            (*at, "temperature"),
            f"rows are sampled at temperature {sampling.temperature:g} and trained at {trained:g}: {algorithm} would "
            "compare log-probs of different distributions",
            f"write `trainer: {{temperature: {sampling.temperature:g}}}`",
        )
    for key, cuts, off in (("top_p", sampling.top_p < 1, 1.0), ("top_k", sampling.top_k > 0, 0)):
        if cuts and sampling.temperature > 0:
            said = f"stored log-probs describe the distribution that {key} truncated: {algorithm}'s ratio is biased"
            found.warn((*at, key), said, f"write {off} for training; evaluation has its own sampling")


@dataclass(frozen=True, slots=True)
class AlgorithmNeeds:
    """What the algorithm, its advantage included, needs of the rows it trains on."""

    algorithm: str
    reward: bool
    logprobs: bool
    groups: bool


def algorithm_needs(spec: Spec) -> AlgorithmNeeds | None:
    """The needs of the trainer's algorithm; None when nothing is trained or the trainer declares no algorithm."""
    config: Any = getattr(spec.trainer, "algorithm", None)
    if config is None:
        return None
    needs = ALGORITHMS.load(config.type)(config).needs
    return AlgorithmNeeds(config.type, needs.reward, needs.logprobs, needs.groups)


def _numbers(spec: Spec, found: Findings) -> None:
    """Sizes and periods that must fit each other."""
    loop, explorer = spec.loop, spec.explorer
    read = getattr(spec.trainer, "read", None)
    if isinstance(read, ReadPolicy) and found.sound("trainer.read", "loop.publish_every"):
        _batch(spec, read, found)
        if read.max_staleness is not None and explorer is not None and loop.publish_every - 1 > read.max_staleness:
            found.problem(
                ("loop", "publish_every"),
                f"rows get up to {loop.publish_every - 1} weight versions old before new weights are published, and "
                f"trainer.read.max_staleness is {read.max_staleness}",
                f"publish at least every {read.max_staleness + 1} steps, or allow more staleness",
            )
    checkpoint = getattr(spec.trainer, "checkpoint", None)
    if checkpoint is not None and checkpoint.every_steps % loop.publish_every and explorer is not None:
        found.problem(
            ("trainer", "checkpoint", "every_steps"),
            f"checkpoints every {checkpoint.every_steps} steps fall between publications every {loop.publish_every}: "
            "a resumed run would explore with other weights than the uninterrupted one",
            f"write a multiple of {loop.publish_every}",
        )
    periods = (
        (
            ("trainer", "checkpoint", "every_steps"),
            getattr(getattr(spec.trainer, "checkpoint", None), "every_steps", None),
        ),
        (("loop", "evaluate", "every_steps"), loop.evaluate.every_steps if loop.evaluate is not None else None),
    )
    for path, every in periods:
        if isinstance(every, int) and every > loop.steps and found.sound("loop.steps"):
            found.warn(path, f"{every} is more than the {loop.steps} steps of the run", f"write {loop.steps} or less")


def _batch(spec: Spec, read: ReadPolicy, found: Findings) -> None:
    explorer = spec.explorer
    at: PathParts = ("trainer", "read", "rows")
    if read.min_rows > read.rows:
        found.problem(
            ("trainer", "read", "min_rows"), f"min_rows is {read.min_rows} and rows only {read.rows}", "lower min_rows"
        )
    if explorer is None or not found.sound("explorer.group_size", "explorer.tasks_per_step"):
        return
    size, rows = explorer.group_size, read.rows
    if rows < size:
        found.problem(
            at, f"a group of {size} rows never fits a batch of {rows}", f"write {size} or more, or make groups smaller"
        )
    elif rows % size:
        whole = rows // size * size
        found.warn(
            at,
            f"groups have {size} rows, so a batch of at most {rows} holds {whole}",
            f"write {whole} or {whole + size}",
        )
    made = size * explorer.tasks_per_step
    if size <= rows and made < rows:
        found.warn(
            ("explorer", "tasks_per_step"),
            f"one exploration makes {made} rows and a batch holds {rows}: every step starts with several explorations, "
            "or trains smaller batches",
            f"write {-(-rows // size)} for one exploration a batch",
        )


def _extras(spec: Spec, found: Findings) -> None:
    """Optional packages that the run will ask for; a warning, because checking is often done on another machine."""
    used: list[tuple[PathParts, Registry, ComponentConfig]] = []
    used += [(("models", name), MODELS, config) for name, config in spec.models.items()]
    used += [(("tasks", name), TASKSETS, config) for name, config in spec.tasks.items()]
    if spec.explorer is not None:
        used.append((("explorer", "workflow"), WORKFLOWS, spec.explorer.workflow))
    if spec.trainer is not None:
        used.append((("trainer",), TRAINERS, spec.trainer))
    for path, registry, config in used:
        name = getattr(config, "type", None)
        if isinstance(name, str):
            declared = getattr(registry.load(name), "requires", None)
            warn_of_extras(path, declared or _PACKAGES.get((registry.kind, name), ()), found)
    if spec.report.plot is not None:
        warn_of_extras(("report", "plot"), (("matplotlib", "view"),), found)
    if spec.report.tensorboard:
        warn_of_extras(("report", "tensorboard"), (("tensorboard", "torch"),), found)


def warn_of_extras(path: PathParts, requires: Iterable[tuple[str, str]], found: Findings) -> None:
    """Warn of every module in `requires` that is not installed; nothing is imported."""
    for module, extra in requires:
        if not importable(module):
            found.warn(
                path,
                f"needs the package {module!r}, which is not installed here",
                f"pip install 'buffer-engine[{extra}]'",
            )


def importable(module: str) -> bool:
    """Whether `module` is installed; imports nothing."""
    return find_spec(module.partition(".")[0]) is not None
