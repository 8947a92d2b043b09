"""Chat messages to token ids, and the assistant spans of a finished dialogue, by a tokenizer's own template.

Spans are found by differencing: the template is applied to growing prefixes of the dialogue, and what an assistant
turn adds to the text is that turn. No assumption is made about markers, so any template works that only appends.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import Any

from buffer_engine.errors import ModelError, RolloutError
from explorers.base import Message

_PLACEHOLDER = {"role": "system", "content": "placeholder"}


class ChatTemplate:
    """A tokenizer's chat template, with or without the system turn that the template adds on its own.

    Args:
        tokenizer: a Hugging Face fast tokenizer with a chat template.
        end_ids: token ids that end an assistant turn.
        default_system: false drops the system turn that templates such as SmolLM2's put before a dialogue that has
            none. The dialogue is then rendered behind a placeholder system turn, and exactly the text of that turn is
            taken off again; a beginning-of-text token in front of it stays.

    Raises:
        ModelError: `default_system` is false and the template cannot render a system turn on its own.
    """

    def __init__(self, tokenizer: Any, *, end_ids: frozenset[int], default_system: bool = True) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._placeholder: str | None = None
        self._start = ""
        if not default_system:
            self._placeholder, self._start = self._system_turn()

    @property
    def hash(self) -> str:
        """Hash of the template and of whether its own system turn is used."""
        text = json.dumps([self._tokenizer.chat_template, self._placeholder is None], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def render(self, messages: Sequence[Message], *, tools: str | None = None) -> tuple[int, ...]:
        """Ids of the prompt that asks for the next assistant turn."""
        return tuple(self._encode(self._text([_fields(message) for message in messages], prompt=True, tools=tools)))

    def encode_dialogue(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Ids of a finished dialogue and a mask that is true on assistant tokens, their end token included.

        What a template writes after the end token (a newline) is not the assistant's: no model samples it.

        Raises:
            RolloutError: kind `template`: there is no assistant turn, one comes first, or the template rewrites
                earlier turns when later ones follow.
        """
        fields = [_fields(message) for message in messages]
        turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
        if not turns:
            raise RolloutError("template", "the dialogue has no assistant turn")
        if turns[0] == 0:
            raise RolloutError("template", "the dialogue begins with an assistant turn; put a user turn before it")
        whole = self._text(fields, prompt=False)
        spans: list[tuple[int, int]] = []
        for turn in turns:
            before = self._text(fields[:turn], prompt=True)
            through = self._text(fields[: turn + 1], prompt=False)
            if not (through.startswith(before) and whole.startswith(through)):
                raise RolloutError(
                    "template",
                    f"the chat template rewrites earlier turns (seen at message {turn}); import one row per reply",
                )
            spans.append((len(before), len(through)))
        return self._mask(whole, spans)

    def _mask(self, text: str, spans: list[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = list(encoded["input_ids"])
        offsets: list[tuple[int, int]] = list(encoded["offset_mapping"])
        starts = {start for start, _ in spans}
        if any(first < start < last for first, last in offsets for start in starts):
            # A token reaches over the border between prompt and reply, which sampling can never produce:
            # encode the pieces on their own, as generation does.
            ids, offsets = self._encode_pieces(text, sorted({0, *starts, len(text)}))
        mask = [False] * len(ids)
        for start, stop in spans:
            inside = [at for at, (first, last) in enumerate(offsets) if start <= first and last <= stop]
            ends = [at for at in inside if ids[at] in self._end_ids]
            for at in inside:
                mask[at] = not ends or at <= ends[-1]
        return tuple(ids), tuple(mask)

    def _encode_pieces(self, text: str, borders: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for start, stop in itertools.pairwise(borders):
            piece = self._tokenizer(text[start:stop], add_special_tokens=False, return_offsets_mapping=True)
            ids.extend(piece["input_ids"])
            offsets.extend((first + start, last + start) for first, last in piece["offset_mapping"])
        return ids, offsets

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text(self, fields: list[dict[str, Any]], *, prompt: bool, tools: str | None = None) -> str:
        # With tools the system turn carries them, so it is never the template's to drop.
        drop = self._placeholder is not None and tools is None and bool(fields) and fields[0]["role"] != "system"
        shown = [_PLACEHOLDER, *fields] if drop else fields
        text = self._apply(shown, prompt=prompt, tools=tools)
        return self._start + text.removeprefix(self._placeholder or "") if drop else text

    def _apply(self, fields: list[dict[str, Any]], *, prompt: bool, tools: str | None = None) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    fields,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    tools=json.loads(tools) if tools is not None else None,
                )
            )
        except Exception as error:  # templates are foreign programs and raise what they like
            raise RolloutError("template", f"the chat template refused the messages: {error}") from error

    def _system_turn(self) -> tuple[str, str]:
        """Text of the placeholder system turn, and the beginning-of-text token that it starts with, if any."""
        user = {"role": "user", "content": "x"}
        advice = "use default_system: true, or give every task a system message"
        try:
            alone = self._apply([_PLACEHOLDER], prompt=False)
            followed = self._apply([_PLACEHOLDER, user], prompt=False)
        except RolloutError as error:
            raise ModelError(f"default_system: false: {error} → {advice}") from error
        if not followed.startswith(alone) or _PLACEHOLDER["content"] not in alone:
            raise ModelError(f"default_system: false: the template folds the system turn into others → {advice}")
        first = self._tokenizer.bos_token or ""
        rest = followed[len(alone) :]
        # Some templates open every turn with this token (then the rest has it too), others write it once.
        once = bool(first) and alone.startswith(first) and not rest.startswith(first)
        return alone, first if once else ""


def _fields(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls is not None:
        fields["tool_calls"] = json.loads(message.tool_calls)
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields
