"""A whole pipeline small enough for tests: a tiny Llama learns to use letters of the first half of the alphabet."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc


def write_specification(
    folder: Path, model: Path, *, name: str = "tiny", steps: int = 6, store: str = "store", extra: str = ""
) -> Path:
    """Write tasks and a specification into `folder`; the store will be `folder/<store>`."""
    tasks = folder / "tasks.jsonl"
    if not tasks.exists():
        lines = [json.dumps({"question": f"say {word}", "wanted": "(?s).*[a-m].*"}) for word in WORDS]
        tasks.write_text("\n".join(lines) + "\n")
    split = "{share: 0.25, seed: 3, part: %s}"
    text = f"""
    version: 1
    name: {name}
    seed: 11
    store: {{path: {folder / store}, durability: process}}
    models:
      policy: {{type: transformers, path: {model}, dtype: float32}}
    tasks:
      train: {{type: jsonl, path: {tasks}, prompt: question, split: {split % "rest"}}}
      heldout: {{type: jsonl, path: {tasks}, prompt: question, partition: eval, split: {split % "held_out"}}}
    explorer:
      model: policy
      tasks: train
      workflow: {{type: single_turn}}
      group_size: 4
      tasks_per_step: 4
      chunk_rows: 8
      sampling: {{temperature: 1.0, max_tokens: 3}}
    operators:
      - {{id: right, type: regex_or_exact_match, mode: regex, gold: wanted}}
      - {{id: ended, type: ended, weight: 0}}
      - {{type: group_reward_std, column: right, over: survivors}}
    trainer:
      type: torch
      model: policy
      algorithm: {{type: grpo}}
      optimizer: {{learning_rate: 3.0e-3}}
      precision: float32
      token_budget: 512
      threads: 1
      read: {{type: fifo, rows: 16, max_staleness: 2}}
      checkpoint: {{every_steps: 3, keep: 2}}
    loop:
      mode: sync
      steps: {steps}
      on_starved: skip
      evaluate: {{tasks: heldout, every_steps: 3, solved: right}}
    """
    file = folder / f"{name}-{store}.yaml"
    file.write_text(textwrap.dedent(text) + textwrap.dedent(extra))
    return file


WORDS = [
    # One prompt each.
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "red",
    "green",
    "blue",
    "black",
    "white",
    "north",
    "south",
    "east",
    "west",
    "spring",
    "summer",
    "autumn",
    "winter",
    "apple",
    "pear",
    "plum",
    "cherry",
    "grape",
    "lemon",
    "melon",
    "peach",
]


def manifest_rows(table: pa.Table) -> list[dict[str, object]]:
    """`batch_rows` in order of batch and position, as Python values."""
    return table.sort_by([("batch_id", "ascending"), ("position", "ascending")]).to_pylist()


def trained_counts(batch_rows: pa.Table, committed: set[str]) -> dict[str, int]:
    """How many committed batches hold each rollout."""
    ids = pa.array(sorted(committed), pa.string())
    kept = batch_rows.filter(pc.is_in(batch_rows.column("batch_id"), value_set=ids))
    counts = pc.value_counts(kept.column("experience_id").combine_chunks())
    return {entry["values"]: entry["counts"] for entry in counts.to_pylist()}
