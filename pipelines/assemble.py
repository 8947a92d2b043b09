"""From a plan to the running parts of one run: store, tasks, engine, explorer, curator, trainer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from buffer_engine.errors import ConfigError, TasksetError
from buffer_engine.identity import prompt_hash
from buffer_engine.schema import TASKS
from buffer_engine.store import open_store
from buffer_engine.store.base import ExperienceStore
from buffer_engine.weights import MemoryWeightChannel
from explorers.base import Engine, Explorer, Sampling, Task
from explorers.local import LocalExplorer
from explorers.models.opening import open_engine
from explorers.models.weights_cache import resolve_model_folder
from explorers.registry import TASKSETS, WORKFLOWS
from pipelines.clock import now
from pipelines.curate import Curator
from pipelines.plan import Plan
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


def open_run_store(spec: Spec) -> ExperienceStore:
    """The specification's store, made if it is not there."""
    return open_store(spec.store.path, durability=spec.store.durability)


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
        explorer = _explorer(spec, engine, explorer_section.sampling, purpose="explore")
        if spec.loop.evaluate is not None:
            evaluation = spec.loop.evaluate.sampling.model_copy(
                update={"max_tokens": explorer_section.sampling.max_tokens, "stop": explorer_section.sampling.stop}
                if "max_tokens" not in spec.loop.evaluate.sampling.model_fields_set
                else {}
            )
            evaluator = _explorer(spec, engine, evaluation, purpose="evaluate")
    trainer: Trainer | None = None
    if trainer_section is not None:
        trainer = TRAINERS.load(trainer_section.type)(
            trainer_section, _model_folder(spec, trainer_section.model), seed=spec.seed
        )
    _store_tasks(store, tasks)
    return Assembly(
        spec=spec,
        config_hash=plan.config_hash,
        run_id=run_id,
        folder=Path(spec.store.path),
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
        config: Any = spec.tasks[name]
        tasks: list[Task] = TASKSETS.load(config.type)(config).load(name)
        if not tasks:
            raise TasksetError(f"task set {name!r} ({config.type}) has no tasks")
        loaded[name] = tasks
    return loaded


def _store_tasks(store: ExperienceStore, tasks: dict[str, list[Task]]) -> None:
    """Tasks are rows too: stored once, compared on every start."""
    import json

    for group in tasks.values():
        dictionaries = [[message.as_dict() for message in task.messages] for task in group]
        table = pa.table(
            {
                "task_id": [task.task_id for task in group],
                "taskset": [task.taskset for task in group],
                "partition": [task.partition for task in group],
                "messages": dictionaries,
                "prompt_hash": [prompt_hash(messages) for messages in dictionaries],
                "info_json": [json.dumps(task.info, ensure_ascii=False, sort_keys=True) for task in group],
                "created_at": [now()] * len(group),
            },
            schema=TASKS.schema,
        )
        store.append("tasks", table)


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
    return open_engine(spec.models[names[0]])


def _explorer(spec: Spec, engine: Engine, sampling: Sampling, *, purpose: str) -> Explorer:
    section = spec.explorer
    assert section is not None
    workflow: Any = section.workflow
    return LocalExplorer(
        engine,
        WORKFLOWS.load(workflow.type)(workflow),
        sampling=sampling,
        chunk_rows=section.chunk_rows,
        timeout_seconds=section.timeout_seconds,
        max_retries=section.max_retries,
        seed=spec.seed,
    )


def _model_folder(spec: Spec, name: str) -> Path:
    model: Any = spec.models[name]
    return resolve_model_folder(model.path)
