"""The explorer of one process: chunks of whole groups, all attempts of a chunk at once, one engine batch at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from buffer_engine import schema
from buffer_engine.errors import PartitionError
from buffer_engine.store.base import Partition
from explorers.attempts import RETRIED, Played, RecordedChat, event, play
from explorers.base import Chunk, Engine, GroupPlan, Sampling, Workflow
from explorers.batching import BatchGatherer
from explorers.recorder import Attempt


def split_into_chunks(groups: Sequence[GroupPlan], chunk_rows: int) -> list[list[GroupPlan]]:
    """Whole groups in order, as many per chunk as fit `chunk_rows` attempts; a larger group is a chunk of its own.

    Depends on nothing but the arguments, so a resumed exploration finds the same chunks again.
    """
    chunks: list[list[GroupPlan]] = []
    room = 0
    for group in groups:
        if not chunks or group.group_size > room:
            chunks.append([])
            room = chunk_rows
        chunks[-1].append(group)
        room -= group.group_size
    return chunks


class LocalExplorer:
    """An `Explorer` on an engine in this process.

    Args:
        author: name under which the workflow's scores are stored.
        score_weights: share of each score in the reward; 1 where not named, None for a metric only.
        chunk_rows: most attempts played at once, and the unit in which results are handed over.
        timeout_seconds: per attempt; None: no limit. A workflow that blocks the thread cannot be interrupted.
        seed: all sampling seeds derive from it and from what is played, never from when.
        max_retries: further attempts after a failure of the engine, the workflow or time. Only the last attempt
            becomes rows; each earlier one becomes an event `retry` with its error.
        quiet_seconds: see `BatchGatherer`.
    """

    def __init__(
        self,
        engine: Engine,
        workflow: Workflow,
        *,
        sampling: Sampling | None = None,
        author: str = "workflow",
        score_weights: Mapping[str, float | None] | None = None,
        chunk_rows: int = 64,
        timeout_seconds: float | None = 600.0,
        seed: int = 0,
        max_retries: int = 0,
        quiet_seconds: float = 0.05,
    ) -> None:
        self._engine = engine
        self._workflow = workflow
        self._sampling = sampling or Sampling.model_validate({})
        self._author = author
        self._score_weights = dict(score_weights or {})
        self._chunk_rows = chunk_rows
        self._timeout_seconds = timeout_seconds
        self._seed = seed
        self._max_retries = max_retries
        self._quiet_seconds = quiet_seconds

    async def explore(
        self,
        groups: Sequence[GroupPlan],
        *,
        run_id: str,
        step: int,
        partition: Partition,
        start_chunk: int = 0,
    ) -> AsyncIterator[Chunk]:
        """Play `groups` in chunks of fixed composition, from chunk `start_chunk` on.

        Cancelling ends the engine's call and all attempts before it returns; the unfinished chunk leaves nothing.

        Raises:
            PartitionError: a task belongs to the other partition; nothing is played.
        """
        for group in groups:
            if group.task.partition != partition:
                raise PartitionError(
                    f"task {group.task.task_id} of task set {group.task.taskset!r} is in partition "
                    f"{group.task.partition!r}, and {partition!r} is being explored"
                )
        chunks = split_into_chunks(groups, self._chunk_rows)
        for index in range(start_chunk, len(chunks)):
            played = await self._play_chunk(chunks[index], run_id=run_id, step=step)
            yield _chunk(index, played)

    async def _play_chunk(self, groups: Sequence[GroupPlan], *, run_id: str, step: int) -> list[Played]:
        keys = [(at, sample) for at, group in enumerate(groups) for sample in range(group.group_size)]
        gatherer = BatchGatherer(
            lambda requests, cancelled: self._engine.generate(requests, cancelled=cancelled),
            live=len(keys),
            quiet_seconds=self._quiet_seconds,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._play_one(groups[key[0]], key, gatherer, run_id=run_id, step=step))
                    for key in keys
                ]
        finally:
            await gatherer.close()
        return [task.result() for task in running]

    async def _play_one(
        self, plan: GroupPlan, key: tuple[int, int], gatherer: BatchGatherer, *, run_id: str, step: int
    ) -> Played:
        retries: list[dict[str, Any]] = []
        try:
            for number in range(self._max_retries + 1):
                attempt = Attempt(
                    run_id=run_id,
                    step=step,
                    plan=plan,
                    sample=key[1],
                    attempt=number,
                    tokenizer_id=self._engine.tokenizer_id,
                    template_hash=self._engine.template_hash,
                )
                chat = RecordedChat(self._engine, gatherer, attempt, key, self._seed, self._sampling)
                played, failure = await play(
                    self._workflow,
                    chat,
                    timeout_seconds=self._timeout_seconds,
                    author=self._author,
                    weights=self._score_weights,
                )
                if failure is None or failure.kind not in RETRIED or number == self._max_retries:
                    return Played(played.rollouts, played.scores, retries + played.events, played.tokens)
                detail = f"task {plan.task.task_id}, sample {key[1]}, attempt {number}: {failure}"
                retries.append(event(attempt, "retry", 1, detail=detail))
            raise AssertionError("the last attempt always returns")
        finally:
            gatherer.leave()


def _chunk(index: int, played: Sequence[Played]) -> Chunk:
    return Chunk(
        index=index,
        rollouts=pa.Table.from_pylist([row for one in played for row in one.rollouts], schema.ROLLOUTS.schema),
        scores=pa.Table.from_pylist([row for one in played for row in one.scores], schema.SCORES.schema),
        events=pa.Table.from_pylist([row for one in played for row in one.events], schema.EVENTS.schema),
        generated_tokens=sum(one.tokens for one in played),
    )
