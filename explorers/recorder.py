"""Token-exact recording of one attempt, behind the workflow's back.

Ids are never made again from text. A later turn joins the row being recorded only where its rendered prompt starts with
exactly the ids held so far; otherwise a new row starts and the break is counted. Every token of a row is therefore one
that the model really saw or really sampled, in that order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from buffer_engine.errors import RolloutError
from buffer_engine.identity import experience_id
from explorers.base import Generation, GroupPlan, Message, Outcome, Sampling, StopReason


@dataclass(slots=True)
class Segment:
    """One row in the making: everything sampled behind one unbroken token prefix."""

    messages: tuple[Message, ...]
    sampling: Sampling
    seed: int
    logprob_kind: str
    prompt_length: int
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    stop_reason: StopReason = "error"
    eos_sampled: bool = False

    def continues(self, prompt_ids: Sequence[int]) -> bool:
        """Whether `prompt_ids` start with exactly the ids held."""
        return list(prompt_ids[: len(self.token_ids)]) == self.token_ids

    def same_distribution(self, sampling: Sampling, kind: str) -> bool:
        """Whether log-probs drawn with `sampling` may stand in this row, which states one distribution for all."""
        ours, theirs = self.sampling, sampling
        return (ours.temperature, ours.top_p, ours.top_k, self.logprob_kind) == (
            theirs.temperature,
            theirs.top_p,
            theirs.top_k,
            kind,
        )

    def extend(self, prompt_ids: Sequence[int], generation: Generation) -> None:
        """Take over the unseen part of the prompt, untrained, and then the sampled tokens."""
        unseen = len(prompt_ids) - len(self.token_ids)
        sampled = len(generation.token_ids)
        self.token_ids += [*prompt_ids[len(self.token_ids) :], *generation.token_ids]
        self.loss_mask += [False] * unseen + [True] * sampled
        self.logprobs += [*([None] * unseen), *generation.logprobs]
        if self.versions and self.versions[-1][0] == generation.model_version:
            sampled += self.versions.pop()[1]
        self.versions.append((generation.model_version, sampled))
        self.stop_reason = generation.stop_reason
        self.eos_sampled = generation.eos_sampled


@dataclass(slots=True)
class Recording:
    """All rows of one attempt, and how often a new one had to be started."""

    segments: list[Segment] = field(default_factory=list)
    prefix_breaks: int = 0
    sampling_breaks: int = 0

    def record(
        self,
        *,
        messages: Sequence[Message],
        prompt_ids: Sequence[int],
        generation: Generation,
        reply: Message,
        sampling: Sampling,
        seed: int,
    ) -> None:
        """Add one turn: the prompt as rendered, what was sampled, and both as messages."""
        segment = self._segment_for(prompt_ids, sampling, generation.logprob_kind)
        if segment is None:
            segment = Segment((), sampling, seed, generation.logprob_kind, len(prompt_ids))
            self.segments.append(segment)
        segment.messages = (*messages, reply)
        segment.extend(prompt_ids, generation)

    def _segment_for(self, prompt_ids: Sequence[int], sampling: Sampling, kind: str) -> Segment | None:
        if not self.segments:
            return None
        last = self.segments[-1]
        if not last.continues(prompt_ids):
            self.prefix_breaks += 1
            return None
        if not last.same_distribution(sampling, kind):
            self.sampling_breaks += 1
            return None
        return last


@dataclass(frozen=True, slots=True)
class Attempt:
    """Who plays what: the key of an attempt, and what its rows have in common."""

    run_id: str
    step: int
    plan: GroupPlan
    sample: int
    attempt: int
    tokenizer_id: str
    template_hash: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt failed; `str()` is the text of the `error` column."""

    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


def check_outcome(outcome: Outcome) -> None:
    """Refuse scores that are not finite numbers and info that is not JSON.

    Raises:
        RolloutError: kind `outcome`; names the score or key.
    """
    for name, value in outcome.scores.items():
        if not _is_finite(value):
            raise RolloutError("outcome", f"score {name!r} is {value!r}, which is not a finite number")
    for key, value in outcome.info.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RolloutError("outcome", f"info {key!r} is not JSON: {error}") from error


def rollout_rows(
    attempt: Attempt, recording: Recording, outcome: Outcome | None, failure: Failure | None
) -> list[dict[str, Any]]:
    """Rows of `schema.ROLLOUTS`, one per segment; a failed attempt without any sampled token still gives one row."""
    rows = [_row(attempt, turn, segment) for turn, segment in enumerate(recording.segments)]
    if not rows:
        rows = [_empty_row(attempt)]
    if outcome is not None and outcome.stop_reason is not None:
        rows[-1]["stop_reason"] = outcome.stop_reason
    if failure is not None:
        rows[-1]["stop_reason"] = "timeout" if failure.kind == "timeout" else "error"
    info = json.dumps(dict(outcome.info) if outcome is not None else {}, ensure_ascii=False, sort_keys=True)
    for row in rows:
        row["error"] = None if failure is None else str(failure)
        row["truncated"] = row["stop_reason"] in ("length", "max_turns", "timeout")
        row["info_json"] = info
    return rows


def score_rows(
    attempt: Attempt,
    experience_ids: Sequence[str],
    outcome: Outcome,
    *,
    author: str,
    weights: Mapping[str, float | None],
) -> list[dict[str, Any]]:
    """Rows of `schema.SCORES`: each score of the attempt, given to each of its rows; weight 1 unless stated."""
    return [
        {
            "experience_id": row,
            "name": name,
            "value": float(value),
            "weight": weights.get(name, 1.0),
            "source": "workflow",
            "author": author,
            "version": 1,
            "run_id": attempt.run_id,
            "scored_at": datetime.now(UTC),
            "comment": None,
        }
        for row in experience_ids
        for name, value in outcome.scores.items()
    ]


def _is_finite(value: object) -> bool:
    # Workflows are foreign code: the annotation alone does not keep a string or NaN out.
    return isinstance(value, int | float) and math.isfinite(value)


def _identity(attempt: Attempt, turn: int) -> dict[str, Any]:
    plan = attempt.plan
    return {
        "experience_id": experience_id(
            attempt.run_id, plan.task.task_id, plan.group_id, attempt.attempt, attempt.sample, turn
        ),
        "parent_id": None,
        "made_by": "explorer",
        "run_id": attempt.run_id,
        "task_id": plan.task.task_id,
        "group_id": plan.group_id,
        "group_size": plan.group_size,
        "attempt": attempt.attempt,
        "sample_index": attempt.sample,
        "turn_index": turn,
        "partition": plan.task.partition,
        "explore_step": attempt.step,
        "tokenizer_id": attempt.tokenizer_id,
        "template_hash": attempt.template_hash,
        "created_at": datetime.now(UTC),
    }


def _row(attempt: Attempt, turn: int, segment: Segment) -> dict[str, Any]:
    sampling = segment.sampling
    return _identity(attempt, turn) | {
        "model_version": min(version for version, _ in segment.versions),
        "token_versions": [{"version": version, "length": length} for version, length in segment.versions if length],
        "messages": [message.as_dict() for message in segment.messages],
        "token_ids": segment.token_ids,
        "loss_mask": segment.loss_mask,
        "logprobs": segment.logprobs,
        "logprob_kind": segment.logprob_kind,
        "prompt_length": segment.prompt_length,
        "stop_reason": segment.stop_reason,
        "eos_sampled": segment.eos_sampled,
        "sampling": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens,
            "seed": segment.seed,
        },
    }


def _empty_row(attempt: Attempt) -> dict[str, Any]:
    return _identity(attempt, 0) | {
        "model_version": None,
        "token_versions": [],
        "messages": [message.as_dict() for message in attempt.plan.task.messages],
        "token_ids": [],
        "loss_mask": [],
        "logprobs": None,
        "logprob_kind": None,
        "prompt_length": 0,
        "stop_reason": "error",
        "eos_sampled": False,
        "sampling": None,
    }
