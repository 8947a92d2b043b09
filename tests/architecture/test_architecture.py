"""The shape of the code: who imports whom, what importing costs, and how long a module may be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from buffer_engine.config import ComponentConfig
from buffer_engine.registry import Registry
from explorers.registry import MODELS, TASKSETS, WORKFLOWS
from operators.registry import OPERATORS
from pipelines.describe import document
from pipelines.reference import PAGES, nested_fields
from pipelines.spec import Spec
from trainers.registry import ADVANTAGES, ALGORITHMS, TRAINERS

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("buffer_engine", "operators", "explorers", "trainers", "pipelines")
HEAVY = {
    "torch", "transformers", "peft", "vllm", "ray", "label_studio_sdk", "data_juicer", "matplotlib", "reasoning_gym",
    "math_verify", "safetensors", "tensorboard",
}  # fmt: skip
REGISTRIES = (OPERATORS, TASKSETS, WORKFLOWS, MODELS, TRAINERS, ALGORITHMS, ADVANTAGES)
COMPONENTS = [(registry, name) for registry in REGISTRIES for name in registry.names()]
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_the_import_rules_hold() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stdout


def modules_after(statement: str) -> set[str]:
    """Top-level names of what a fresh interpreter has imported after `statement`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=True,
    )
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_importing_every_component_imports_nothing_heavy() -> None:
    loads = "\n".join(
        f"from {module} import {names}\nfor found in ({names},):\n    for name in found.names(): found.load(name)"
        for module, names in (
            ("operators.registry", "OPERATORS"),
            ("explorers.registry", "MODELS, TASKSETS, WORKFLOWS"),
            ("trainers.registry", "ADVANTAGES, ALGORITHMS, TRAINERS"),
        )
    )

    assert not HEAVY & modules_after(loads)


def test_importing_the_base_package_imports_next_to_nothing() -> None:
    assert not (HEAVY | {"duckdb", "polars", "pyarrow", "numpy", "pydantic"}) & modules_after("import buffer_engine")


def test_the_configuration_imports_neither_duckdb_nor_anything_heavy() -> None:
    assert not (HEAVY | {"duckdb"}) & modules_after("import pipelines.plan")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_says_what_it_is_and_stays_readable(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()

    assert len(lines) <= 400, f"{len(lines)} lines: split it by reasons to change"
    assert not lines or lines[0].startswith('"""'), "the first line says what the module is"


@pytest.mark.parametrize(("registry", "name"), COMPONENTS, ids=[f"{kind.group}-{name}" for kind, name in COMPONENTS])
def test_a_registered_component_is_documented_with_all_its_fields(registry: Registry, name: str) -> None:
    found = registry.load(name)

    assert (found.__doc__ or "").strip(), "a component says what it is"
    assert issubclass(found.Config, ComponentConfig)
    assert "type" in found.Config.model_fields
    silent = {doc.name for _, doc in nested_fields(found.Config) if not doc.description} - {"type"}
    assert not silent, "fields without a description"


def test_every_field_of_the_specification_is_documented() -> None:
    silent = [doc.name for _, doc in nested_fields(Spec) if not doc.description]

    assert not silent


def test_a_documented_default_is_the_real_one() -> None:
    class Sample(BaseModel):
        number: int = 3
        flag: bool = False
        nothing: str | None = None
        needed: float
        pair: tuple[float, float] = (0.1, 0.2)

    assert [(doc.name, doc.kind, doc.default) for doc in document(Sample)] == [
        ("number", "whole number", "3"),
        ("flag", "true or false", "false"),
        ("nothing", "text or null", "null"),
        ("needed", "number", None),
        ("pair", "list of number", "[0.1, 0.2]"),
    ]


@pytest.mark.parametrize("page", PAGES)
def test_a_generated_page_says_what_the_code_says(page: str) -> None:
    """Mend it with `python -m pipelines.reference docs`."""
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == PAGES[page]()
