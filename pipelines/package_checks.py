"""Optional packages that a run will ask for: found missing before it starts, without importing any of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec

from buffer_engine.config import ComponentConfig
from buffer_engine.registry import Registry
from explorers.registry import MODELS, TASKSETS, WORKFLOWS
from pipelines.findings import Findings
from pipelines.spec import Spec
from pipelines.yaml_text import PathParts
from trainers.registry import TRAINERS

_PACKAGES: Mapping[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("model", "transformers"): (("torch", "torch"), ("transformers", "torch")),
    ("trainer", "torch"): (("torch", "torch"), ("transformers", "torch")),
    ("task set", "reasoning_gym"): (("reasoning_gym", "demo"),),
}
"""(kind, type) → (module, extra) of shipped components that do not declare `requires` themselves."""


def check_packages(spec: Spec, found: Findings) -> None:
    """Warn of packages that are not here, each once: checking is often done on another machine than running."""
    named: set[str] = set()
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
            _warn(path, declared or _PACKAGES.get((registry.kind, name), ()), named, found)
    if spec.store.catalog is not None:
        _warn(("store", "catalog"), (("psycopg", "postgres"),), named, found)
    if spec.report.plot is not None:
        _warn(("report", "plot"), (("matplotlib", "view"),), named, found)
    if spec.report.tensorboard:
        _warn(("report", "tensorboard"), (("tensorboard", "torch"),), named, found)


def _warn(path: PathParts, requires: Iterable[tuple[str, str]], named: set[str], found: Findings) -> None:
    """Warn of every module in `requires` that is not installed and not in `named`, which grows."""
    for module, extra in requires:
        if module not in named and not importable(module):
            named.add(module)
            found.warn(
                path,
                f"needs the package {module!r}, which is not installed here",
                f"pip install 'buffer-engine[{extra}]'",
            )


def importable(module: str) -> bool:
    """Whether `module` is installed; imports nothing."""
    return find_spec(module.partition(".")[0]) is not None
