"""Small rows for every table a store test needs, valid as they are; keyword arguments change a field."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

import buffer_engine
from buffer_engine.schema import TABLES
from buffer_engine.store import open_store
from buffer_engine.store.base import ReadPolicy

WHEN = datetime(2025, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
Row = dict[str, Any]


def table(name: str, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Rows as an Arrow table of that name's schema."""
    return pa.Table.from_pylist(list(rows), schema=TABLES[name].schema)


def rollout(number: int, *, group_size: int = 2, **changes: Any) -> Row:
    """Rollout `x<number>`, sample `number % group_size` of group `g<number // group_size>`; four tokens."""
    row: Row = {
        "experience_id": f"x{number}", "parent_id": None, "made_by": "explorer", "run_id": "run",
        "task_id": f"t{number // group_size}", "group_id": f"g{number // group_size}", "group_size": group_size,
        "attempt": 0, "sample_index": number % group_size, "turn_index": 0, "partition": "train",
        "explore_step": 1, "model_version": 0, "token_versions": [{"version": 0, "length": 2}],
        "messages": [
            {"role": "user", "content": f"question {number}", "tool_calls": None, "tool_call_id": None, "media": None},
            {"role": "assistant", "content": "ü", "tool_calls": None, "tool_call_id": None, "media": ["a", "b"]},
        ],
        "token_ids": [number, 2, 3, 4], "loss_mask": [False, False, True, True],
        "logprobs": [None, None, -0.5, -0.25], "logprob_kind": "raw", "prompt_length": 2, "stop_reason": "eos",
        "eos_sampled": True, "truncated": False, "error": None,
        "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": None, "max_tokens": 8, "seed": 7},
        "tokenizer_id": "tok", "template_hash": "tpl", "info_json": "{}", "created_at": WHEN,
    }  # fmt: skip
    unknown = set(changes) - set(row)
    assert not unknown, unknown
    return row | changes


def rollouts(numbers: Iterable[int], **changes: Any) -> pa.Table:
    """Rollouts with these numbers."""
    return table("rollouts", [rollout(number, **changes) for number in numbers])


def task(name: str, **changes: Any) -> Row:
    """Training task `name` with a prompt of its own."""
    message = {"role": "user", "content": name, "tool_calls": None, "tool_call_id": None, "media": None}
    return {
        "task_id": name, "taskset": "set", "partition": "train", "messages": [message],
        "prompt_hash": f"hash of {name}", "info_json": "{}", "created_at": WHEN,
    } | changes  # fmt: skip


def decision(experience_id: str, verdict: str = "keep", **changes: Any) -> Row:
    """A verdict of the pipeline in pass p1."""
    return {
        "experience_id": experience_id, "verdict": verdict, "operator": "pipeline", "position": None,
        "reason": "test", "detail": None, "ref_id": None, "pass_id": "p1", "run_id": "run", "decided_at": WHEN,
    } | changes  # fmt: skip


def decisions(numbers: Iterable[int], verdict: str = "keep", **changes: Any) -> pa.Table:
    """The same verdict about rollouts with these numbers."""
    return table("decisions", [decision(f"x{number}", verdict, **changes) for number in numbers])


def score(experience_id: str, value: float | None = 1.0, **changes: Any) -> Row:
    """First version of component `answer`."""
    return {
        "experience_id": experience_id, "name": "answer", "value": value, "weight": 1.0, "source": "operator",
        "author": "answer", "version": 1, "run_id": "run", "scored_at": WHEN, "comment": None,
    } | changes  # fmt: skip


def manifest(batch_id: str, step: int, experience_ids: Iterable[str], **changes: Any) -> tuple[pa.Table, pa.Table]:
    """The `batches` row and the `batch_rows` of a batch."""
    ids = list(experience_ids)
    batch = {
        "batch_id": batch_id, "run_id": "run", "step": step, "model_version": step - 1, "algorithm": "grpo",
        "rows": len(ids), "trained_tokens": 2 * len(ids), "config_hash": "c", "code_commit": "d",
        "reader_json": "{}", "rng_json": "{}", "created_at": WHEN,
    } | changes  # fmt: skip
    rows = [
        {
            "batch_id": batch_id, "position": at, "experience_id": one, "group_id": "g", "reward": 1.0,
            "advantage": 0.5, "weight": 1.0, "kind": "rollout", "score_versions_json": "{}",
        }
        for at, one in enumerate(ids)
    ]  # fmt: skip
    return table("batches", [batch]), table("batch_rows", rows)


def model(version: int, **changes: Any) -> pa.Table:
    """The `models` row of a weight version."""
    row = {
        "run_id": "run", "version": version, "parent": version - 1, "step": version, "path": None,
        "config_hash": "c", "code_commit": "d", "created_at": WHEN,
    } | changes  # fmt: skip
    return table("models", [row])


def child_environment() -> dict[str, str]:
    """Environment in which a child process imports the package and these rows."""
    roots = [str(Path(buffer_engine.__file__).parents[1]), str(Path(__file__).parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(roots), "OMP_NUM_THREADS": "1"}


def fill_store(folder: Path) -> None:
    """Tasks, 12 rollouts, scores in two versions, verdicts that change, two trained batches and one that waits."""
    with open_store(folder, durability="process") as store:
        store.append("tasks", table("tasks", [task(f"t{number}") for number in range(6)]))
        store.append("models", model(0, parent=None, step=0))
        for number in range(0, 12, 2):
            at = WHEN + timedelta(seconds=number)
            pair = [rollout(one, created_at=at) for one in (number, number + 1)]
            store.append("rollouts", table("rollouts", pair), cursors={"seen": number + 2})
            late = at + timedelta(seconds=1)
            scores = [score(f"x{one}", float(one), scored_at=late) for one in (number, number + 1)]
            store.append_all(
                {
                    "decisions": decisions([number, number + 1], decided_at=late),
                    "scores": table("scores", scores),
                }
            )
        store.append("decisions", decisions([10], "reject", pass_id="p2", decided_at=WHEN + timedelta(seconds=60)))
        for step in (1, 2, 3):
            held = store.reserve(ReadPolicy.model_validate({"rows": 2}), run_id="run", batch_id=f"b{step}",
                                 model_version=step - 1)  # fmt: skip
            assert held is not None
            batch, rows = manifest(f"b{step}", step, held.experience_ids)
            store.prepare_batch(held, step=step, batch=batch, rows=rows)
            if step < 3:
                store.commit_batch(f"b{step}", step=step, model=model(step))
        event = {"run_id": "run", "step": 1, "kind": "retry", "count": 2, "experience_id": None, "detail": None,
                 "recorded_at": WHEN}  # fmt: skip
        store.append("events", table("events", [event]))
