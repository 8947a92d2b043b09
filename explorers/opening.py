"""From configurations to the parts of an exploration."""

from __future__ import annotations

from explorers.base import Engine, TaskSet, Workflow
from explorers.config import ExplorerConfig
from explorers.local import LocalExplorer
from explorers.registry import TASKSETS, WORKFLOWS
from explorers.tasksets.base import TasksetConfig
from explorers.workflows.base import WorkflowConfig


def open_taskset(config: TasksetConfig) -> TaskSet:
    """The task set that `config` describes; reads nothing yet."""
    taskset: TaskSet = TASKSETS.load(config.type)(config)
    return taskset


def open_workflow(config: WorkflowConfig) -> Workflow:
    """The workflow that `config` describes."""
    workflow: Workflow = WORKFLOWS.load(config.type)(config)
    return workflow


def open_explorer(config: ExplorerConfig, engine: Engine, *, seed: int) -> LocalExplorer:
    """An explorer in this process, as the `explorer:` section says."""
    return LocalExplorer(
        engine,
        open_workflow(config.workflow),
        sampling=config.sampling,
        author=config.workflow.type,
        score_weights=config.workflow.score_weights,
        chunk_rows=config.chunk_rows,
        timeout_seconds=config.timeout_seconds,
        seed=seed,
        max_retries=config.max_retries,
    )
