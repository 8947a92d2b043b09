"""Tasks as rows of the `tasks` table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime

import pyarrow as pa

from buffer_engine import schema
from buffer_engine.identity import prompt_hash
from explorers.base import Task


def tasks_table(tasks: Sequence[Task]) -> pa.Table:
    """Rows of `schema.TASKS`, in order."""
    now = datetime.now(UTC)
    rows = [
        {
            "task_id": task.task_id,
            "taskset": task.taskset,
            "partition": task.partition,
            "messages": [message.as_dict() for message in task.messages],
            "prompt_hash": prompt_hash([message.as_dict() for message in task.messages]),
            "info_json": json.dumps(dict(task.info), ensure_ascii=False, sort_keys=True),
            "created_at": now,
        }
        for task in tasks
    ]
    return pa.Table.from_pylist(rows, schema.TASKS.schema)
