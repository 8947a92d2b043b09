"""A model that says what it is told, without torch: for tests, dry runs and examples.

It is a whole engine (ids, log-probs, seeds, stop reasons, context limit, failures), so everything around a model can be
exercised in milliseconds. Its tokens are UTF-8 bytes and three marks; a reply's choice is one random draw, so the first
token of a reply carries the log-probability of the choice and the others are certain (0).
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from buffer_engine.config import ComponentConfig
from buffer_engine.errors import RolloutError
from buffer_engine.identity import stable_digest
from buffer_engine.weights import WeightVersion
from explorers.base import Generation, GenerationRequest, Message, Sampling
from explorers.models.base import ModelConfig
from explorers.models.token_choice import logprob_kind

PAD, START, END = 0, 1, 2
FIRST_BYTE = 3
VOCABULARY = FIRST_BYTE + 256


class ScriptedReply(ComponentConfig):
    """One thing the model may say."""

    text: str = Field("", description="the reply; \\1 … insert groups of the pattern")
    weight: float = Field(1.0, gt=0, description="share of this reply among its alternatives")
    error: str | None = Field(None, description="fail this request with this message")
    crash: str | None = Field(None, description="make the whole engine call raise with this message")
    delay_seconds: float = Field(0.0, ge=0, description="wait this long before replying")
    end: bool = Field(True, description="false: never end; the reply is cut at max_tokens")


class ScriptedConfig(ModelConfig):
    """Replies by pattern: the first pattern found in the last message that is not the assistant's gives the choices."""

    type: Literal["scripted"] = "scripted"
    replies: Mapping[str, tuple[ScriptedReply, ...]] = Field(
        description="regular expression → replies (a string, or a mapping with text, weight, error …)"
    )
    context_length: int = Field(4096, gt=0, description="most tokens (bytes and marks) of prompt and reply")

    @field_validator("replies", mode="before")
    @classmethod
    def _short_forms(cls, value: object) -> object:
        if isinstance(value, list | tuple):
            value = {"": value}
        if not isinstance(value, Mapping):
            return value
        return {
            pattern: [
                {"text": reply} if isinstance(reply, str) else reply
                for reply in ([given] if isinstance(given, str | Mapping) else given)
            ]
            for pattern, given in value.items()
        }

    @model_validator(mode="after")
    def _patterns_work(self) -> Self:
        if not self.replies:
            raise ValueError("give at least one pattern with replies")
        for pattern, replies in self.replies.items():
            if not replies:
                raise ValueError(f"pattern {pattern!r} has no replies")
            try:
                compiled = re.compile(f"(?:{pattern})|")
                for reply in replies:
                    compiled.sub(reply.text, "")
            except re.error as error:
                raise ValueError(f"pattern {pattern!r}: {error}") from error
        return self


@dataclass(frozen=True, slots=True)
class _Script:
    pattern: re.Pattern[str]
    replies: tuple[ScriptedReply, ...]


class ScriptedEngine:
    """An `Engine` that replies by script."""

    Config: ClassVar[type[ScriptedConfig]] = ScriptedConfig

    def __init__(self, config: ScriptedConfig) -> None:
        self.config = config
        self._scripts = tuple(_Script(re.compile(pattern), replies) for pattern, replies in config.replies.items())
        self._version = 0

    @property
    def model_version(self) -> int:
        """Number of the weights last handed over; the replies do not depend on it."""
        return self._version

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and reply together."""
        return self.config.context_length

    @property
    def tokenizer_id(self) -> str:
        """Bytes and three marks."""
        return "scripted-bytes@1"

    @property
    def template_hash(self) -> str:
        """Hash of the fixed template."""
        return stable_digest("scripted-template", 1, size=8)

    def render(self, messages: Sequence[Message], *, tools: str | None = None) -> tuple[int, ...]:
        """START role newline content END per message, then START assistant newline."""
        ids: list[int] = []
        for message in messages:
            ids += [START, *_bytes(f"{message.role}\n{message.content}"), END]
        return (*ids, START, *_bytes("assistant\n"))

    def encode_dialogue(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Ids of a finished dialogue and a mask that is true on assistant content and its END.

        Raises:
            RolloutError: kind `template`: there is no assistant turn, or one comes first.
        """
        if all(message.role != "assistant" for message in messages):
            raise RolloutError("template", "the dialogue has no assistant turn")
        if messages[0].role == "assistant":
            raise RolloutError("template", "the dialogue begins with an assistant turn; put a user turn before it")
        ids: list[int] = []
        mask: list[bool] = []
        for message in messages:
            head, body = [START, *_bytes(f"{message.role}\n")], [*_bytes(message.content), END]
            ids += head + body
            mask += [False] * len(head) + [message.role == "assistant"] * len(body)
        return tuple(ids), tuple(mask)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled ids, marks left out."""
        return bytes(token - FIRST_BYTE for token in token_ids if token >= FIRST_BYTE).decode("utf-8", "replace")

    def generate(
        self, requests: Sequence[GenerationRequest], *, cancelled: Callable[[int], bool] | None = None
    ) -> list[Generation]:
        """Reply to every request by script; see `Engine.generate`.

        Raises:
            RuntimeError: a chosen reply says `crash`.
        """
        return [self._reply(index, request, cancelled) for index, request in enumerate(requests)]

    def load_weights(self, weights: WeightVersion) -> None:
        """Take over the version number."""
        self._version = weights.version

    def _reply(self, index: int, request: GenerationRequest, cancelled: Callable[[int], bool] | None) -> Generation:
        room = self.context_length - len(request.prompt_ids)
        if room <= 0:
            return self._failed(
                request,
                f"context: the prompt has {len(request.prompt_ids)} tokens and the context holds {self.context_length}",
            )
        script, match = self._script_for(_last_turn(request.prompt_ids))
        reply, share = _choose(script.replies, request)
        if reply.crash is not None:
            raise RuntimeError(reply.crash)
        if not _waited(reply.delay_seconds, lambda: cancelled is not None and cancelled(index)):
            return self._failed(request, "cancelled: nobody waits for the reply any more")
        if reply.error is not None:
            return self._failed(request, f"engine: {reply.error}")
        return self._spoken(request, match.expand(reply.text), reply.end, share, room)

    def _spoken(self, request: GenerationRequest, text: str, end: bool, share: float, room: int) -> Generation:
        most = min(request.sampling.max_tokens, room)
        ids = [*_bytes(text), END]
        if not end:
            ids = (ids[:-1] or list(_bytes("."))) * (most // max(1, len(ids) - 1) + 1)
        stop = self._stop_position(ids, request.sampling)
        ids = ids[: min(most, stop if stop is not None else most)]
        reason = "eos" if ids[-1] == END else ("stop" if stop == len(ids) else "length")
        return Generation(
            token_ids=tuple(ids),
            logprobs=(math.log(share), *(0.0 for _ in ids[1:])),
            stop_reason=reason,
            eos_sampled=reason == "eos",
            model_version=self._version,
            logprob_kind=logprob_kind(request.sampling),
        )

    def _stop_position(self, ids: Sequence[int], sampling: Sampling) -> int | None:
        """Tokens up to the end of the earliest stop string, None when there is none."""
        text = bytes(token - FIRST_BYTE for token in ids if token >= FIRST_BYTE)
        ends = [text.find(stop.encode()) + len(stop.encode()) for stop in sampling.stop if stop.encode() in text]
        return min(ends, default=None)

    def _script_for(self, text: str) -> tuple[_Script, re.Match[str]]:
        for script in self._scripts:
            match = script.pattern.search(text)
            if match is not None:
                return script, match
        known = ", ".join(repr(script.pattern.pattern) for script in self._scripts)
        raise RuntimeError(
            f"no pattern of the scripted model matches {text[:80]!r} → patterns: {known}; add one for it"
        )

    def _failed(self, request: GenerationRequest, error: str) -> Generation:
        return Generation((), (), "error", False, self._version, logprob_kind(request.sampling), error)


def _bytes(text: str) -> tuple[int, ...]:
    return tuple(byte + FIRST_BYTE for byte in text.encode("utf-8"))


def _last_turn(prompt_ids: Sequence[int]) -> str:
    """Text of the last turn of a rendered prompt that is not the assistant's."""
    pieces = itertools.groupby(prompt_ids, key=lambda token: token >= FIRST_BYTE)
    spoken = [bytes(token - FIRST_BYTE for token in piece).decode("utf-8", "replace") for text, piece in pieces if text]
    for turn in reversed(spoken):
        role, _, content = turn.partition("\n")
        if role in ("user", "tool", "system"):
            return content
    return ""


def _choose(replies: Sequence[ScriptedReply], request: GenerationRequest) -> tuple[ScriptedReply, float]:
    """A reply and the probability with which it was chosen: greedy takes the heaviest, the first of equals."""
    total = sum(reply.weight for reply in replies)
    if request.sampling.temperature == 0:
        best = max(replies, key=lambda reply: reply.weight)
        return best, best.weight / total
    drawn = float(np.random.Generator(np.random.Philox(key=request.seed)).random()) * total
    for reply in replies:
        drawn -= reply.weight
        if drawn < 0:
            return reply, reply.weight / total
    return replies[-1], replies[-1].weight / total


def _waited(seconds: float, cancelled: Callable[[], bool]) -> bool:
    """Wait; False as soon as the reply is no longer wanted."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if cancelled():
            return False
        time.sleep(min(left, 0.01))
    return not cancelled()
