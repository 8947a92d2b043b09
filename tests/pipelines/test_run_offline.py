"""The offline path on a tiny model: dialogues in, cleaned and filtered, fine-tuned, every row accounted for."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from buffer_engine.inspect import connect_store
from pipelines.load import load_spec
from pipelines.runner import start_run

SPECIFICATION = """
version: 1
name: offline
seed: 1
store: {{path: {store}, durability: process}}
models:
  policy: {{type: transformers, path: {model}, dtype: float32}}
imports:
  chats: {{path: {data}, model: policy}}
operators:
  - {{id: tidy, type: normalize_text, forms: [nfkc, ws], columns: [prompt, response], rewrite: true}}
  - {{type: length_filter, unit: word, min: 2, max: 20}}
  - {{type: exact_dedup, columns: [prompt, response]}}
trainer:
  type: torch
  model: policy
  algorithm: {{type: sft}}
  optimizer: {{learning_rate: 3.0e-3}}
  precision: float32
  read: {{type: fifo, rows: 4, max_uses: 3}}
  checkpoint: {{every_steps: 2, keep: 1}}
loop: {{steps: 6}}
"""

DIALOGUES = [
    ("what is one", "one is one"),
    ("what is two", "two is two"),
    ("what is one", "one is one"),  # a duplicate
    ("what  is three", "three  is   three"),  # cleaned: replaced by a new row
    ("what is four", "four"),  # too short
    ("what is five", "five is five"),
    ("what is six", "six is six"),
]


def test_dialogues_are_imported_cleaned_filtered_and_trained_with_every_row_accounted_for(
    tmp_path: Path, tiny_model: Path
) -> None:
    data = tmp_path / "chats.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": reply}]}
        for ask, reply in DIALOGUES
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "offline.yaml"
    file.write_text(SPECIFICATION.format(store=tmp_path / "store", model=tiny_model, data=data))
    report = start_run(load_spec(file), Console(file=io.StringIO()))
    assert report.outcome.stopped == ""

    with connect_store(tmp_path / "store") as inspection:
        drops = inspection.rows("SELECT operator, reason, count(*) AS n FROM drops GROUP BY ALL ORDER BY ALL")
        assert drops == [
            {"operator": "exact_dedup", "reason": "duplicate", "n": 1},
            {"operator": "length_filter", "reason": "too_short", "n": 1},
            {"operator": "tidy", "reason": "replaced", "n": 1},
        ]
        cleaned = inspection.rows(
            "SELECT prompt, response, parent_id IS NOT NULL AS derived FROM experiences WHERE made_by = 'tidy'"
        )
        assert cleaned == [{"prompt": "what is three", "response": "three is three", "derived": True}]
        # No row is used more often than `max_uses` allows.
        uses = inspection.rows("SELECT sum(uses) AS uses, max(uses) AS most FROM experiences")
        assert uses[0]["most"] <= 3
        assert inspection.rows("SELECT count(*) AS n FROM conservation WHERE NOT balanced") == [{"n": 0}]
        losses = inspection.rows("SELECT step, value FROM metrics WHERE name = 'train/loss' ORDER BY step")
    assert losses[-1]["value"] < losses[0]["value"]
