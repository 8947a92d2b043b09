"""Small frames and tables for the tests of operators, and short ways to run one operator on them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import polars as pl
import pyarrow as pa

from buffer_engine.schema import ROLLOUTS, SCORES, TASKS
from operators.base import Context, Operator, OperatorConfig, Result
from operators.registry import OPERATORS

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CONTEXT = Context(seed=1, model_version=10, step=1)


def config(kind: str, **fields: Any) -> OperatorConfig:
    """The configuration of a registered operator, as YAML would give it."""
    return OPERATORS.load(kind).Config.model_validate({"type": kind, **fields})


def frame(columns: Mapping[str, Sequence[Any]], schema: Mapping[str, Any] | None = None) -> pl.DataFrame:
    """A frame with ids x0, x1, … unless given; one group unless given."""
    height = len(next(iter(columns.values())))
    ids = {
        "experience_id": [f"x{row}" for row in range(height)],
        "task_id": ["t0"] * height,
        "group_id": ["g0"] * height,
    }
    return pl.DataFrame(ids | dict(columns), schema_overrides=schema or {})


def apply(kind: str, rows: pl.DataFrame, context: Context = CONTEXT, **fields: Any) -> Result:
    """What a registered operator says about `rows`."""
    operator: Operator[Any] = OPERATORS.load(kind)(config(kind, **fields))
    try:
        return operator.apply(rows, context)
    finally:
        operator.close()


def reasons(result: Result) -> dict[int, str]:
    """Row → reason of its verdict."""
    assert result.verdicts is not None
    return dict(result.verdicts.select("row", "reason").rows())


def details(result: Result) -> dict[int, str | None]:
    """Row → detail of its verdict."""
    assert result.verdicts is not None
    return dict(result.verdicts.select("row", "detail").rows())


def message(role: str, content: str | None) -> dict[str, Any]:
    """One chat message as the tables hold it."""
    return {"role": role, "content": content, "tool_calls": None, "tool_call_id": None, "media": []}


def rollout(experience_id: str, **fields: Any) -> dict[str, Any]:
    """One row of `rollouts`: two prompt tokens and three sampled ones unless said otherwise."""
    return {
        "experience_id": experience_id, "parent_id": None, "made_by": "explorer", "run_id": "run", "task_id": "t0",
        "group_id": "g0", "group_size": 2, "attempt": 0, "sample_index": 0, "turn_index": 0, "partition": "train",
        "explore_step": 1, "model_version": 0, "token_versions": [],
        "messages": [message("user", "2+2?"), message("assistant", "4")],
        "token_ids": [1, 2, 3, 4, 5], "loss_mask": [False, False, True, True, True],
        "logprobs": [None, None, -1.0, -2.0, -3.0], "logprob_kind": "raw", "prompt_length": 2, "stop_reason": "eos",
        "eos_sampled": True, "truncated": False, "error": None, "sampling": None, "tokenizer_id": "tok",
        "template_hash": "h", "info_json": "{}", "created_at": NOW,
    } | fields  # fmt: skip


def rollouts(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=ROLLOUTS.schema)


def tasks(infos: Mapping[str, Mapping[str, Any]]) -> pa.Table:
    """Tasks by id with their info."""
    rows = [
        {"task_id": task_id, "taskset": "set", "partition": "train", "messages": [], "prompt_hash": task_id,
         "info_json": json.dumps(info), "created_at": NOW}
        for task_id, info in infos.items()
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=TASKS.schema)


def scores(*rows: tuple[str, str, float | None, float | None, int]) -> pa.Table:
    """Score rows from (experience_id, name, value, weight, version)."""
    return pa.Table.from_pylist(
        [
            {"experience_id": who, "name": name, "value": value, "weight": weight, "source": "operator",
             "author": name, "version": version, "run_id": "run", "scored_at": NOW, "comment": None}
            for who, name, value, weight, version in rows
        ],
        schema=SCORES.schema,
    )  # fmt: skip
