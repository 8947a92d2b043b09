"""A sound specification in a folder, for tests to break."""

from __future__ import annotations

import json
from pathlib import Path

TEXT = """\
version: 1
name: tiny
seed: 11
store: {path: FOLDER/store}
models:
  policy: {type: scripted, replies: {"": ["yes"]}}
tasks:
  train: {type: jsonl, split: {share: 0.5, part: rest}, path: FOLDER/tasks.jsonl, prompt: question}
  heldout: {type: jsonl, split: {share: .5, part: held_out}, path: FOLDER/tasks.jsonl, prompt: question, partition: eval}
explorer:
  model: policy
  tasks: train
  group_size: 4
  tasks_per_step: 4
  sampling: {max_tokens: 3}
operators:
  - {id: correct, type: regex_or_exact_match, gold: wanted}
  - {id: finished, type: ended, weight: 0}
  - {type: group_reward_std, column: correct}
trainer:
  type: torch
  model: policy
  algorithm: {type: grpo}
  read: {rows: 16}
  checkpoint: {every_steps: 3}
loop:
  steps: 6
  evaluate: {tasks: heldout, every_steps: 3, solved: correct}
"""  # noqa: E501


def write_sample(folder: Path, *changes: tuple[str, str], name: str = "tiny.yaml") -> Path:
    """Write the sample with each (old, new) replaced; an `old` that is not there is a mistake of the test."""
    (folder / "tasks.jsonl").write_text(json.dumps({"question": "say yes", "wanted": "yes"}) + "\n")
    text = TEXT
    for old, new in changes:
        if text.count(old) != 1:
            raise AssertionError(f"{old!r} occurs {text.count(old)} times in the sample")
        text = text.replace(old, new)
    file = folder / name
    file.write_text(text.replace("FOLDER", str(folder)))
    return file
