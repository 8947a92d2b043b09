"""Exploration as a resumable phase: chunks of fixed composition, each appended with its cursor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from buffer_engine.store.base import ExperienceStore, OnInvalid, Partition
from explorers.base import Chunk, Explorer, GroupPlan
from pipelines.metrics import metric_rows


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
    record: bool = True,
    on_invalid: OnInvalid = "refuse_all",
) -> dict[str, float]:
    """Play `groups` from the first chunk not yet stored, and move `done_cursors` when all are.

    Args:
        on_invalid: what becomes of a chunk with a bad row, see `ExperienceStore.append_all`.

    Returns:
        Tokens and seconds of what was played now (chunks stored before an interruption took their time then); stored
        as metrics of `step` with the cursors when `record` is true.
    """
    started = time.perf_counter()
    tokens = 0

    async def run() -> None:
        nonlocal tokens
        start = store.cursor(chunk_cursor)
        async for chunk in explorer.explore(groups, run_id=run_id, step=step, partition=partition, start_chunk=start):
            tables = {"rollouts": chunk.rollouts, "scores": chunk.scores, "events": chunk.events}
            store.append_all(
                {name: table for name, table in tables.items() if table.num_rows},
                cursors={chunk_cursor: chunk.index + 1},
                on_invalid=on_invalid,
            )
            tokens += chunk.generated_tokens
            on_chunk(chunk)

    asyncio.run(run())
    seconds = time.perf_counter() - started
    numbers: dict[str, float] = {}
    if tokens:
        numbers = {
            "explore/tokens": float(tokens),
            "explore/seconds": seconds,
            "explore/tokens_per_second": tokens / seconds,
        }
    tables = {"metrics": metric_rows(run_id, {step: numbers})} if numbers and record else {}
    store.append_all(tables, cursors=done_cursors)
    return numbers
