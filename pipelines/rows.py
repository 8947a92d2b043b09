"""Single rows that the loop writes: a weight version, an event."""

from __future__ import annotations

import pyarrow as pa

from buffer_engine.schema import EVENTS, MODELS
from pipelines.clock import code_commit, now


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
