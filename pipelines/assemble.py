"""From a plan to the running parts of one run: store, tasks, engine, explorer, curator, trainer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from buffer_engine.errors import ConfigError, TasksetError
from buffer_engine.store import open_store
from buffer_engine.store.base import ExperienceStore
from buffer_engine.store.upkeep import KeptStore
from buffer_engine.weights import MemoryWeightChannel
from explorers.base import Engine, Explorer, Task
from explorers.models.base import ModelConfig
from explorers.models.opening import open_engine
from explorers.models.weights_cache import resolve_model
from explorers.opening import open_explorer, open_taskset
from explorers.task_rows import tasks_table
from explorers.tasksets.base import TasksetConfig
from pipelines.checkpoints import file_digest
from pipelines.curate import Curator
from pipelines.inputs import check_inputs, model_digest, tasks_digest
from pipelines.plan import Plan
from pipelines.secrets import reveal
from pipelines.spec import Spec
from trainers.base import Trainer
from trainers.registry import TRAINERS

Part = Literal["explore", "curate", "train"]
ALL_PARTS: tuple[Part, ...] = ("explore", "curate", "train")


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts of one run. What the specification or `--only` leaves out is None."""

    spec: Spec
    config_hash: str
    run_id: str
    folder: Path
    store: ExperienceStore
    tasks: dict[str, list[Task]]
    engine: Engine | None
    explorer: Explorer | None
    evaluator: Explorer | None
    curator: Curator
    trainer: Trainer | None
    channel: MemoryWeightChannel

    def close(self) -> None:
        """Free worker processes and files."""
        self.curator.close()
        self.store.close()


def open_run_store(spec: Spec) -> KeptStore:
    """The specification's store, made if it is not there."""
    section = reveal(spec.store)
    return open_store(
        Path(section.path),
        durability=section.durability,
        catalog=section.catalog,
        segments=section.segments,
        back_pressure=spec.store.back_pressure,
    )


def assemble(plan: Plan, store: ExperienceStore, *, run_id: str, parts: Collection[Part] = ALL_PARTS) -> Assembly:
    """Build what `parts` need. Models and task sets are loaded here, so this can take seconds.

    Raises:
        ConfigError, ModelError, TasksetError, MissingExtraError: with the fix; nothing was written.
    """
    spec = plan.spec
    explorer_section = spec.explorer if "explore" in parts else None
    trainer_section: Any = spec.trainer if "train" in parts else None
    tasks = _load_tasks(spec, explore=explorer_section is not None)
    engine = _engine(spec, explore=explorer_section is not None)
    explorer: Explorer | None = None
    evaluator: Explorer | None = None
    if explorer_section is not None and engine is not None:
        explorer = open_explorer(explorer_section, engine, seed=spec.seed)
        if spec.loop.evaluate is not None:
            sampling = spec.loop.evaluate.sampling.over(explorer_section.sampling)
            evaluator = open_explorer(
                explorer_section.model_copy(update={"sampling": sampling}), engine, seed=spec.seed
            )
    folder = Path(reveal(spec.store).path)
    inputs = {f"tasks {name}": tasks_digest(loaded) for name, loaded in tasks.items()}
    inputs |= {f"import {name}": file_digest(Path(source.path)) for name, source in spec.imports.items()}
    for name in _models_used(spec, explore=explorer_section is not None, train=trainer_section is not None):
        if (model_folder := _model_folder(spec, name)) is not None:
            inputs[f"model {name}"] = model_digest(model_folder)
    check_inputs(folder / "specs" / f"{run_id}.inputs.json", inputs)
    trainer: Trainer | None = None
    if trainer_section is not None:
        model_folder = _model_folder(spec, trainer_section.model)
        if model_folder is None:
            raise ConfigError.one(
                f"model {trainer_section.model!r} has no weights to train",
                path="trainer.model",
                fix="name a model of type transformers",
            )
        trainer = TRAINERS.load(trainer_section.type)(reveal(trainer_section), model_folder, seed=spec.seed)
    for group in tasks.values():
        store.append("tasks", tasks_table(group))
    return Assembly(
        spec=spec,
        config_hash=plan.config_hash,
        run_id=run_id,
        folder=folder,
        store=store,
        tasks=tasks,
        engine=engine,
        explorer=explorer,
        evaluator=evaluator,
        curator=Curator(
            store,
            plan.operators,
            run_id=run_id,
            seed=spec.seed,
            info_columns=plan.task_columns,
            engine=engine,
        ),
        trainer=trainer,
        channel=MemoryWeightChannel(),
    )


def _load_tasks(spec: Spec, *, explore: bool) -> dict[str, list[Task]]:
    """Task sets that the run plays; equal prompts across partitions are refused with both ids."""
    names: list[str] = []
    if explore and spec.explorer is not None:
        names.append(spec.explorer.tasks)
        if spec.loop.evaluate is not None:
            names.append(spec.loop.evaluate.tasks)
    loaded: dict[str, list[Task]] = {}
    for name in names:
        tasks = open_taskset(cast("TasksetConfig", reveal(spec.tasks[name]))).load(name)
        if not tasks:
            raise TasksetError(f"task set {name!r} has no tasks")
        loaded[name] = tasks
    return loaded


def _engine(spec: Spec, *, explore: bool) -> Engine | None:
    """The model that explores, or tokenises imports."""
    names = [spec.explorer.model] if explore and spec.explorer is not None else []
    names += [source.model for source in spec.imports.values()]
    if not names:
        return None
    if len(set(names)) > 1:
        raise ConfigError.one(
            f"explorer and imports use different models ({', '.join(sorted(set(names)))})",
            path="imports",
            fix="one run has one tokenizer: name the same model in all of them",
        )
    return open_engine(cast("ModelConfig", reveal(spec.models[names[0]])))


def _models_used(spec: Spec, *, explore: bool, train: bool) -> list[str]:
    trainer: Any = spec.trainer
    names = [source.model for source in spec.imports.values()]
    if explore and spec.explorer is not None:
        names.append(spec.explorer.model)
    if train and trainer is not None:
        names.append(trainer.model)
    return sorted(set(names))


def _model_folder(spec: Spec, name: str) -> Path | None:
    """The Hugging Face folder of a model; None for a model without one (scripted)."""
    path: str | None = getattr(reveal(spec.models[name]), "path", None)
    return None if path is None else resolve_model(path)
