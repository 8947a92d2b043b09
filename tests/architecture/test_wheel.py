"""The wheel: what is in it, and that it works in an environment which has nothing but the core dependencies."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE_ONLY = """\
version: 1
name: light
store: {path: store}
models:
  policy: {type: scripted, replies: {"": ["yes", "no"]}}
tasks:
  train: {type: jsonl, path: tasks.jsonl, prompt: question}
explorer: {model: policy, tasks: train, group_size: 2, tasks_per_step: 1, sampling: {max_tokens: 8}}
operators:
  - {id: right, type: regex_or_exact_match, gold: wanted}
loop: {steps: 1}
"""
NEEDS_TORCH = """\
trainer: {type: torch, model: policy, algorithm: {type: grpo}, read: {rows: 2}}
"""
pytestmark = pytest.mark.slow


def command(*words: str | Path, cwd: Path, code: int = 0, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a command without this source tree on its path; it must end with `code`."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == code, f"{words} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this source tree."""
    folder = tmp_path_factory.mktemp("dist")
    command(sys.executable, "-m", "build", "--quiet", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands of an environment with the wheel and its core dependencies, and nothing else."""
    folder = tmp_path_factory.mktemp("bare") / "env"
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command(*pip, "-c", ROOT / "constraints.txt", wheel, cwd=folder, timeout=550)
    return folder / "bin"


def test_the_wheel_has_the_expected_shape(wheel: Path) -> None:
    checker = Path(sys.executable).with_name("check-wheel-contents")
    command(checker, "--config", ROOT / "pyproject.toml", wheel, cwd=wheel.parent)


def test_everything_that_the_packages_read_is_in_the_wheel(wheel: Path) -> None:
    packages = ("buffer_engine", "operators", "explorers", "trainers", "pipelines")
    tracked = {
        str(path.relative_to(ROOT))
        for package in packages
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert inside == tracked
    for folder, suffix, fewest in (
        ("buffer_engine/inspect/views", ".sql", 21),
        ("buffer_engine/inspect/queries", ".sql", 14),
        ("pipelines/examples", ".yaml", 3),
        ("pipelines/examples/data", ".jsonl", 1),
    ):
        found = [name for name in inside if name.startswith(f"{folder}/") and name.endswith(suffix)]
        assert len(found) >= fewest, folder


def test_the_bare_environment_works_without_any_extra(bare: Path, tmp_path: Path) -> None:
    missing = command(bare / "python", "-c", "import torch", cwd=tmp_path, code=1)
    assert "No module named 'torch'" in missing.stderr, "the environment is not empty, so the test proves nothing"

    engine = bare / "buffer-engine"
    assert "check" in command(engine, "--help", cwd=tmp_path).stdout
    assert command(engine, "schema", cwd=tmp_path).stdout.startswith("tasks: ")
    (tmp_path / "tasks.jsonl").write_text('{"question": "say yes", "wanted": "yes"}\n')
    (tmp_path / "light.yaml").write_text(CORE_ONLY)
    command(engine, "check", "light.yaml", cwd=tmp_path)
    command(engine, "run", "light.yaml", cwd=tmp_path)
    counted = command(engine, "sql", "store", "--format", "csv", "SELECT count(*) AS n FROM experiences", cwd=tmp_path)
    assert counted.stdout == "n\n2\n"
    assert "sound" in command(engine, "store", "verify", "store", cwd=tmp_path).stdout
    for query in ("learning_curve", "waiting_rows"):
        command(engine, "sql", "store", "--name", query, cwd=tmp_path)


def test_what_needs_an_extra_ends_with_3_and_the_install_line(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"question": "say yes", "wanted": "yes"}\n')
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    for name in ("model.safetensors", "chat_template.jinja"):
        (model / name).write_text("")
    policy = 'policy: {type: scripted, replies: {"": ["yes", "no"]}}'
    assert policy in CORE_ONLY
    text = CORE_ONLY.replace(policy, f"policy: {{type: transformers, path: {model}}}")
    (tmp_path / "heavy.yaml").write_text(text + NEEDS_TORCH)
    done = command(bare / "buffer-engine", "run", "heavy.yaml", cwd=tmp_path, code=3)
    assert "pip install 'buffer-engine[torch]'" in done.stderr
    assert "Traceback" not in done.stderr
