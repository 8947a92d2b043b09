"""Exploration as a resumable phase: chunks of fixed composition, each appended with its cursor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.store.base import ExperienceStore, Partition
from explorers.base import Chunk, Explorer, GroupPlan


def explore_groups(
    store: ExperienceStore,
    explorer: Explorer,
    groups: Sequence[GroupPlan],
    *,
    run_id: str,
    step: int,
    partition: Partition,
    chunk_cursor: str,
    done_cursors: dict[str, int],
    on_chunk: Callable[[Chunk], None],
) -> dict[str, float]:
    """Play `groups` from the first chunk not yet stored, and move `done_cursors` when all are.

    Returns:
        Numbers of the rows played now (chunks stored before an interruption are not counted again).
    """
    played: list[pa.Table] = []
    tokens = 0

    async def run() -> None:
        nonlocal tokens
        start = store.cursor(chunk_cursor)
        async for chunk in explorer.explore(groups, run_id=run_id, step=step, partition=partition, start_chunk=start):
            tables = {"rollouts": chunk.rollouts, "scores": chunk.scores, "events": chunk.events}
            store.append_all(
                {name: table for name, table in tables.items() if table.num_rows},
                cursors={chunk_cursor: chunk.index + 1},
            )
            played.append(chunk.rollouts.select(["stop_reason", "eos_sampled", "error", "loss_mask"]))
            tokens += chunk.generated_tokens
            on_chunk(chunk)

    asyncio.run(run())
    store.append_all({}, cursors=done_cursors)
    return _numbers(played, tokens)


def _numbers(played: Sequence[pa.Table], tokens: int) -> dict[str, float]:
    if not played:
        return {}
    table = pa.concat_tables(played)
    fine = table.filter(pc.is_null(table.column("error")))
    numbers = {
        "explore/rows": float(table.num_rows),
        "explore/errors": float(table.num_rows - fine.num_rows),
        "explore/tokens": float(tokens),
    }
    if fine.num_rows:
        numbers["explore/ended"] = float(pc.mean(pc.cast(fine.column("eos_sampled"), pa.float64())).as_py())
        numbers["explore/response_tokens"] = tokens / fine.num_rows
    return numbers
