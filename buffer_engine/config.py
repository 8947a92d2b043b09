"""The base of everything a person writes in YAML: frozen, strict, and documented field by field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ComponentConfig(BaseModel):
    """Base of every component's configuration.

    Unknown keys are errors, values are not coerced between kinds silently, and instances are immutable: a
    configuration describes a component and holds no state of a run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
