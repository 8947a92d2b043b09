"""What the configuration of every model has."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from buffer_engine.config import ComponentConfig


class ModelConfig(ComponentConfig):
    """Base of a model's configuration; each type adds its own fields."""

    # Each type narrows this to its own literal.
    type: Any = Field(description="name of the model type in the registry")
