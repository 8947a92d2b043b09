"""The `explorer:` section of a pipeline."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from buffer_engine.config import ComponentConfig, SerializeAsAny, component
from explorers.base import Sampling
from explorers.registry import WORKFLOWS
from explorers.workflows.base import WorkflowConfig
from explorers.workflows.single_turn import SingleTurnConfig


class ExplorerConfig(ComponentConfig):
    """Who plays which tasks, how, and how many at a time."""

    model: str = Field(min_length=1, description="name under `models`")
    tasks: str = Field(min_length=1, description="name under `tasks`")
    workflow: Annotated[SerializeAsAny[WorkflowConfig], component(WORKFLOWS)] = Field(
        default_factory=SingleTurnConfig, description="how one attempt is played"
    )
    group_size: int = Field(8, gt=0, description="attempts per task")
    tasks_per_step: int = Field(8, gt=0, description="tasks played between two optimizer steps")
    sampling: Sampling = Field(default_factory=lambda: Sampling.model_validate({}), description="how tokens are drawn")
    order: Literal["sequential", "shuffle"] = Field("shuffle", description="order of tasks within an epoch")
    chunk_rows: int = Field(64, gt=0, description="most attempts played at once and handed over together")
    timeout_seconds: float | None = Field(600.0, gt=0, description="per attempt; null: no limit")
    max_retries: int = Field(0, ge=0, description="further attempts after an engine, workflow or time failure")
