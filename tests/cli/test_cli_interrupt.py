"""Ctrl-C during a run: a real SIGINT to a real process, one line that says how to go on, and `resume` does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.cli.main import run_command
from pipelines.cli.shadowing import ROOT

SPECIFICATION = """\
version: 1
name: slow
store: {path: FOLDER/store}
models:
  policy: {type: scripted, replies: {"": [{text: "yes", delay_seconds: DELAY}]}}
  spare: {type: scripted, replies: {"": ["no"]}}
tasks:
  train: {type: jsonl, path: FOLDER/tasks.jsonl, prompt: question}
explorer: {model: policy, tasks: train, group_size: 2, tasks_per_step: 2}
operators:
  - {id: correct, type: regex_or_exact_match, gold: wanted}
loop: {steps: STEPS}
"""


def write(folder: Path, *, steps: int, delay: float) -> Path:
    lines = [json.dumps({"question": f"say yes {number}", "wanted": "yes"}) for number in range(8)]
    (folder / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    file = folder / "slow.yaml"
    text = SPECIFICATION.replace("FOLDER", str(folder)).replace("STEPS", str(steps)).replace("DELAY", str(delay))
    file.write_text(text)
    return file


@pytest.mark.skipif(os.name != "posix", reason="SIGINT to one process")
def test_ctrl_c_says_how_to_go_on_and_resume_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, steps=3, delay=0.5)
    store = tmp_path / "store"
    running = subprocess.Popen(
        [sys.executable, "-m", "pipelines.cli.main", "run", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    # The specification is saved when the run begins; what follows takes at least six seconds of scripted waiting.
    deadline = time.monotonic() + 60
    while not (store / "specs" / "slow.yaml").exists() and time.monotonic() < deadline and running.poll() is None:
        time.sleep(0.05)
    time.sleep(1)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)

    assert running.returncode == 130, err
    assert out == ""
    assert err.splitlines()[-1] == f"interrupted; continue with `buffer-engine resume {store}`"
    assert "Traceback" not in err

    assert run_command(["resume", str(store)]) == 0
    assert "3 steps" in capsys.readouterr().err


def test_warnings_of_a_run_name_the_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, steps=1, delay=0)

    assert run_command(["run", str(file)]) == 0
    assert f"warning: {file}:6: models.spare: model 'spare' is not used" in capsys.readouterr().err
