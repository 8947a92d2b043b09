"""The base of everything a person writes in YAML: frozen, strict, and documented field by field.

A field that holds another component (`algorithm: {type: grpo, …}`) is declared `Annotated[SomeConfig,
component(REGISTRY)]`: the registry turns the mapping into that component's own configuration, and its errors keep
their place in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, SerializeAsAny
from pydantic_core import PydanticCustomError

from buffer_engine.errors import UnknownComponentError, did_you_mean

if TYPE_CHECKING:
    from buffer_engine.registry import Registry

__all__ = ["ComponentConfig", "ComponentReader", "SerializeAsAny", "component"]


class ComponentConfig(BaseModel):
    """Base of every component's configuration.

    Unknown keys are errors, values are not coerced between kinds silently, and instances are immutable: a
    configuration describes a component and holds no state of a run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


@dataclass(frozen=True)
class ComponentReader(BeforeValidator):
    """The validator of `component`; keeps the registry so that documentation and hints can look up its components."""

    registry: Registry | None = field(default=None, compare=False)


def component(registry: Registry) -> ComponentReader:
    """A validator that reads `{type: NAME, …}` with the configuration class of NAME (`component.Config`).

    Errors of the nested configuration surface at their own location; an unknown NAME is the error type
    `unknown_component` at `type` with `fix` in its context.
    """

    def read(value: object) -> object:
        if isinstance(value, ComponentConfig) or not isinstance(value, Mapping):
            return value
        fields = cast("Mapping[str, Any]", value)
        name = fields.get("type")
        if not isinstance(name, str):
            raise PydanticCustomError(
                "missing_type",
                "a {kind} needs a `type`; {fix}",
                {"kind": registry.kind, "fix": "known: " + ", ".join(registry.names())},
            )
        try:
            configuration = registry.load(name).Config
        except UnknownComponentError as error:
            raise PydanticCustomError(
                "unknown_component",
                "unknown {kind} {name}",
                {"kind": registry.kind, "name": repr(name), "fix": did_you_mean(name, registry.names())},
            ) from error
        try:
            return configuration.model_validate(fields)
        except ValueError:  # validation errors keep their own places
            raise
        except Exception as error:
            raise PydanticCustomError(
                "component_failed",
                "{kind} {name} cannot read its configuration ({error})",
                {"kind": registry.kind, "name": repr(name), "error": f"{type(error).__name__}: {error}"},
            ) from error

    return ComponentReader(read, registry=registry)
