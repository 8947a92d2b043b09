"""`operators new` writes operators that work from the first minute."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from buffer_engine.errors import UsageError
from pipelines.cli.main import run_command
from pipelines.operator_template import FAMILIES, class_name, new_operator

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_operator_of_every_family_passes_its_own_test_and_the_linter(family, tmp_path):
    folder = tmp_path / "mine"
    said = new_operator("loud_thing", family, into=folder, root=tmp_path)
    assert '"mine.loud_thing" = "mine.loud_thing:LoudThing"' in said
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    plain = ["--isolated", "--line-length", "120"]
    linted(["check", *plain, "--select", "E,F,W,I,UP,B", "."], folder)
    linted(["format", "--check", *plain, "."], folder)


def linted(arguments: list[str], folder: Path) -> None:
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    assert ruff is not None, "the extra dev brings ruff"
    done = subprocess.run([ruff, *arguments], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def checkout(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "operators", tmp_path / "operators", ignore=shutil.ignore_patterns("__pycache__"))
    for place in ("pyproject.toml", "docs/operators.md", "tests/operators/test_operator_contract.py"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / place, tmp_path / place)
    return tmp_path


def test_in_a_checkout_all_places_of_the_recipe_are_written(tmp_path, monkeypatch, capsys):
    root = checkout(tmp_path)
    monkeypatch.chdir(root)
    assert run_command(["operators", "new", "loud_filter", "--kind", "filter"]) == 0
    printed = capsys.readouterr().out
    names: dict[str, object] = {}
    exec((root / "operators/registry.py").read_text(encoding="utf-8"), names)
    registry = names["OPERATORS"]
    assert registry.builtin["loud_filter"] == "operators.filter.loud_filter:LoudFilter"  # type: ignore[attr-defined]
    assert (root / "operators/filter/loud_filter.py").is_file()
    assert "class LoudFilter(Operator[LoudFilterConfig])" in (root / "operators/filter/loud_filter.py").read_text()
    table = (root / "docs/operators.md").read_text().split("## Shipped operators")[1].split("## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)[-1] == "loud_filter"
    assert '("loud_filter", {}),' in (root / "tests/operators/test_operator_contract.py").read_text()
    assert "tests/operators/test_loud_filter.py" in printed
    places = ["operators/filter/loud_filter.py", "tests/operators/test_loud_filter.py", "operators/registry.py"]
    linted(["check", *places], root)
    linted(["format", "--check", *places], root)
    assert run_command(["operators", "new", "loud_filter", "--kind", "filter"]) == 2
    assert "there is an operator 'loud_filter' already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "family", "complaint"),
    [
        ("Loud", "filter", "'Loud' is no name for an operator"),
        ("loud_", "filter", "is no name for an operator"),
        ("loud", "filters", "is no family of operators → clean, format, filter"),
        ("loud", "filter", "is no checkout of buffer-engine → name a folder for a plug-in: --into"),
    ],
)
def test_what_cannot_be_written_is_said(name, family, complaint, tmp_path):
    with pytest.raises(UsageError, match=complaint):
        new_operator(name, family, into=None, root=tmp_path)


def test_nothing_that_is_there_is_overwritten(tmp_path):
    new_operator("loud", "filter", into=tmp_path, root=tmp_path)
    (tmp_path / "loud.py").write_text("mine")
    with pytest.raises(UsageError, match="is there already"):
        new_operator("loud", "filter", into=tmp_path, root=tmp_path)
    assert (tmp_path / "loud.py").read_text() == "mine"
    assert class_name("near_dedup_2") == "NearDedup2"
