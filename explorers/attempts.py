"""Plays one attempt: the workflow, its recorded chat model, and the border at which failures become data."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from buffer_engine.errors import RolloutError
from buffer_engine.identity import stable_seed
from explorers.base import Engine, GenerationRequest, Message, Outcome, Reply, Sampling, Workflow
from explorers.batching import BatchGatherer
from explorers.recorder import Attempt, Failure, Recording, check_outcome, rollout_rows, score_rows

RETRIED = frozenset({"engine", "timeout", "workflow"})
"""Failures worth another try; a prompt that does not fit or a wrong outcome fails the same way again."""


@dataclass(slots=True)
class RecordedChat:
    """The `ChatModel` that a workflow gets: renders, samples through the shared batch, and records ids."""

    engine: Engine
    gatherer: BatchGatherer
    attempt: Attempt
    key: tuple[int, int]
    run_seed: int
    sampling: Sampling
    recording: Recording = field(default_factory=Recording)
    turns: int = 0

    async def chat(
        self, messages: Sequence[Message], *, sampling: Sampling | None = None, tools: str | None = None
    ) -> Reply:
        """The next assistant turn; see `ChatModel.chat`. Calls of one attempt must not overlap."""
        chosen = sampling or self.sampling
        turn, self.turns = self.turns, self.turns + 1
        prompt_ids = self.engine.render(messages, tools=tools)
        plan = self.attempt.plan
        seed = stable_seed(
            self.run_seed, plan.task.task_id, plan.group_id, self.attempt.attempt, self.attempt.sample, turn
        )
        generation = await self.gatherer.submit(self.key, GenerationRequest(prompt_ids, chosen, seed))
        reply = Message("assistant", self.engine.decode(generation.token_ids))
        if generation.token_ids:
            self.recording.record(
                messages=messages,
                prompt_ids=prompt_ids,
                generation=generation,
                reply=reply,
                sampling=chosen,
                seed=seed,
            )
        if generation.error is not None:
            kind, _, message = generation.error.partition(": ")
            raise RolloutError(kind, message) if message else RolloutError("engine", generation.error)
        return Reply(reply, generation.stop_reason, len(generation.token_ids))


@dataclass(frozen=True, slots=True)
class Played:
    """What an attempt left behind: rows of rollouts, scores and events, and how many tokens it sampled."""

    rollouts: list[dict[str, Any]]
    scores: list[dict[str, Any]]
    events: list[dict[str, Any]]
    tokens: int


async def play(
    workflow: Workflow,
    chat: RecordedChat,
    *,
    timeout_seconds: float | None,
    author: str,
    weights: Mapping[str, float | None],
) -> tuple[Played, Failure | None]:
    """Run the workflow once; whatever it raises becomes a failure, except being cancelled from outside."""
    outcome: Outcome | None = None
    failure: Failure | None = None
    limit = asyncio.timeout(timeout_seconds)
    try:
        async with limit:
            outcome = await workflow.run(chat.attempt.plan.task, chat)
        check_outcome(outcome)
        if not chat.recording.segments:
            raise RolloutError("workflow", "the workflow ended without asking the model anything")
    except TimeoutError as error:
        if limit.expired():
            failure = Failure("timeout", f"not finished within {timeout_seconds:g} seconds")
        else:
            failure = Failure("workflow", f"TimeoutError: {error}")
    except RolloutError as error:
        failure = Failure(error.kind, str(error))
    except Exception as error:  # noqa: BLE001  the border: a workflow is foreign code, and a failed attempt is data
        failure = Failure("workflow", f"{type(error).__name__}: {error}")
    if failure is not None:
        outcome = None
    rollouts = rollout_rows(chat.attempt, chat.recording, outcome, failure)
    ids = [row["experience_id"] for row in rollouts]
    scores = [] if outcome is None else score_rows(chat.attempt, ids, outcome, author=author, weights=weights)
    tokens = sum(sum(segment.loss_mask) for segment in chat.recording.segments)
    return Played(rollouts, scores, _break_events(chat, ids[0]), tokens), failure


def _break_events(chat: RecordedChat, experience: str) -> list[dict[str, Any]]:
    counts = {"prefix_break": chat.recording.prefix_breaks, "sampling_break": chat.recording.sampling_breaks}
    return [event(chat.attempt, kind, count, experience=experience) for kind, count in counts.items() if count]


def event(
    attempt: Attempt, kind: str, count: int, *, experience: str | None = None, detail: str | None = None
) -> dict[str, Any]:
    """A row of `schema.EVENTS` about an attempt."""
    return {
        "run_id": attempt.run_id,
        "step": attempt.step,
        "kind": kind,
        "count": count,
        "experience_id": experience,
        "detail": detail,
        "recorded_at": datetime.now(UTC),
    }
