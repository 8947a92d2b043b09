"""What the configuration of every workflow has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from buffer_engine.config import ComponentConfig


class WorkflowConfig(ComponentConfig):
    """Base of a workflow's configuration; each type adds its own fields."""

    # Each type narrows this to its own literal.
    type: Any = Field(description="name of the workflow in the registry")
    score_weights: Mapping[str, float | None] = Field(
        default_factory=dict, description="score → share in the reward; 1 where not named, null for a metric only"
    )
