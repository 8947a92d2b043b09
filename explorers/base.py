"""Interfaces of exploration: tasks, engines, chat models, workflows and the explorer itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import pyarrow as pa
from pydantic import Field

from buffer_engine.config import ComponentConfig
from buffer_engine.store.base import Partition
from buffer_engine.weights import WeightVersion

StopReason = Literal["eos", "length", "tool", "stop", "max_turns", "timeout", "error", "imported"]
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; `tool_calls` is JSON text."""

    role: Role
    content: str
    tool_calls: str | None = None
    tool_call_id: str | None = None
    media: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The struct that the tables hold (`schema.MESSAGE`)."""
        return {
            "role": self.role,
            "content": self.content,
            "tool_calls": self.tool_calls,
            "tool_call_id": self.tool_call_id,
            "media": list(self.media),
        }


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to attempt. `info` must be JSON-serialisable; operators read its keys as columns."""

    task_id: str
    taskset: str
    partition: Partition
    messages: tuple[Message, ...]
    info: Mapping[str, Any] = field(default_factory=dict)


class TaskSet(Protocol):
    """A source of tasks."""

    def columns(self) -> Mapping[str, str]:
        """Info keys → Polars type names (`String`, `Int64`, `Float64`, `Boolean`, `Object`) without loading models.

        Raises:
            TasksetError: the source is missing, empty, or lacks a column the configuration names.
        """
        ...

    def load(self, name: str) -> list[Task]:
        """All tasks, in a fixed order, with distinct ids; `name` is the task set's name in the specification."""
        ...


class Sampling(ComponentConfig):
    """How tokens are drawn."""

    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="share of probability drawn from; 1: all")
    top_k: int = Field(0, ge=0, description="0: off")
    max_tokens: int = Field(64, gt=0, description="most new tokens per reply")
    stop: tuple[str, ...] = Field((), description="strings that end a reply")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to continue. `seed` makes its tokens independent of what else is in the batch (bf16 noise aside)."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True)
class Generation:
    """What the engine sampled: ids without the prompt, one log-prob (nats) per id, and why it ended.

    `logprob_kind`: raw | temperature | truncated, the distribution that `logprobs` describe.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason
    eos_sampled: bool
    model_version: int
    logprob_kind: Literal["raw", "temperature", "truncated"]
    error: str | None = None


class Engine(Protocol):
    """A model that continues token sequences, in batches."""

    @property
    def model_version(self) -> int:
        """Version of the weights in use."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and reply together."""
        ...

    @property
    def tokenizer_id(self) -> str:
        """Identity of the tokenizer: name and content hash."""
        ...

    @property
    def template_hash(self) -> str:
        """Hash of the chat template."""
        ...

    def render(self, messages: Sequence[Message], *, tools: str | None = None) -> tuple[int, ...]:
        """Ids of the chat template applied to `messages`, with the generation prompt."""
        ...

    def encode_dialogue(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Ids of a finished dialogue and a mask that is true on assistant tokens (their end token included)."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled ids, special tokens left out."""
        ...

    def generate(
        self, requests: Sequence[GenerationRequest], *, cancelled: Callable[[int], bool] | None = None
    ) -> list[Generation]:
        """Continue all sequences; a request that cannot be served comes back with `error`, the others go on.

        Called from a thread, one call at a time. The engine asks `cancelled(index of the request)` as it goes; where
        that is true it stops working on the request and returns it with an `error` that begins with `cancelled`. An
        `error` has the form `kind: message`, kind `context` for a prompt that does not fit.
        """
        ...

    def load_weights(self, weights: WeightVersion) -> None:
        """Take over newer weights."""
        ...


@dataclass(frozen=True, slots=True)
class Reply:
    """One assistant turn as the workflow sees it; ids and log-probs are recorded behind its back."""

    message: Message
    stop_reason: StopReason
    tokens: int


class ChatModel(Protocol):
    """What a workflow talks to."""

    async def chat(
        self, messages: Sequence[Message], *, sampling: Sampling | None = None, tools: str | None = None
    ) -> Reply:
        """The next assistant turn.

        Raises:
            RolloutError: the prompt does not fit the context, the engine failed, or time ran out.
        """
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished attempt reports besides its tokens: named scores (NaN refused) and JSON-serialisable info."""

    scores: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    stop_reason: StopReason | None = None


class Workflow(Protocol):
    """How one attempt at a task is played."""

    async def run(self, task: Task, chat: ChatModel) -> Outcome:
        """Play the task; raise for a failed attempt (it becomes a row with the error)."""
        ...


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group to play: `group_size` attempts at one task."""

    task: Task
    group_id: str
    group_size: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Finished groups, ready to append.

    Attributes:
        index: 0-based position of the chunk in its exploration; chunks have a fixed composition, so a resumed run
            repeats exactly the missing ones.
        rollouts, scores, events: tables of `buffer_engine.schema`.
    """

    index: int
    rollouts: pa.Table
    scores: pa.Table
    events: pa.Table
    generated_tokens: int


class Explorer(Protocol):
    """Plays groups and yields finished chunks; a failed attempt is a row, never an exception."""

    def explore(
        self,
        groups: Sequence[GroupPlan],
        *,
        run_id: str,
        step: int,
        partition: Partition,
        start_chunk: int = 0,
    ) -> AsyncIterator[Chunk]:
        """Play `groups` in chunks of fixed composition, from chunk `start_chunk` on."""
        ...
