"""Rows that the loop writes: a weight version, an event, what a step saw at its tokens."""

from __future__ import annotations

import pyarrow as pa

from buffer_engine.schema import EVENTS, MODELS, TIMESTAMP, TOKEN_STATS
from pipelines.clock import code_commit, now
from trainers.base import TrainBatch


def model_row(run_id: str, step: int, version: int, *, parent: int | None, config_hash: str) -> pa.Table:
    """One row of `models`: version `version`, made by `step` from `parent` (None: the start)."""
    return pa.table(
        {
            "run_id": [run_id],
            "version": [version],
            "parent": pa.array([parent], pa.int64()),
            "step": [step],
            "path": pa.nulls(1, pa.string()),
            "config_hash": [config_hash],
            "code_commit": [code_commit()],
            "created_at": [now()],
        },
        schema=MODELS.schema,
    )


def event_row(run_id: str, step: int | None, kind: str, count: int, detail: str) -> pa.Table:
    """One row of `events`; `step: None` is outside the loop."""
    return pa.table(
        {
            "run_id": [run_id],
            "step": pa.array([step], pa.int64()),
            "kind": [kind],
            "count": [count],
            "experience_id": pa.nulls(1, pa.string()),
            "detail": [detail],
            "recorded_at": [now()],
        },
        schema=EVENTS.schema,
    )


def token_stats_rows(run_id: str, batch: TrainBatch, stats: pa.Table | None) -> pa.Table | None:
    """What a trainer recorded of `batch`, as rows of `token_stats`; None when it recorded nothing."""
    if stats is None:
        return None
    columns = {name: stats.column(name) for name in stats.column_names} | {
        "batch_id": pa.repeat(batch.batch_id, stats.num_rows),
        "run_id": pa.repeat(run_id, stats.num_rows),
        "step": pa.repeat(pa.scalar(batch.step, pa.int64()), stats.num_rows),
        "recorded_at": pa.repeat(pa.scalar(now(), TIMESTAMP), stats.num_rows),
    }
    return pa.table([columns[name] for name in TOKEN_STATS.schema.names], schema=TOKEN_STATS.schema)
