"""Reading chat messages out of foreign rows: OpenAI's form and ShareGPT's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from explorers.base import Message, Role

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def read_messages(value: object) -> tuple[Message, ...]:
    """Messages of a list whose items have role and content (OpenAI) or from and value (ShareGPT).

    Raises:
        ValueError: what is wrong and at which message, without where it came from; callers add file and line.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"should be a list of messages and is {_short(value)}")
    found = cast("Sequence[object]", value)
    if not found:
        raise ValueError("is an empty list of messages")
    return tuple(_read_message(entry, position) for position, entry in enumerate(found))


def _read_message(entry: object, position: int) -> Message:
    if not isinstance(entry, Mapping):
        raise ValueError(f"message {position} should be an object and is {_short(entry)}")
    fields = cast("Mapping[str, Any]", entry)
    role, content = fields.get("role", fields.get("from")), fields.get("content", fields.get("value"))
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"message {position} has role {_short(role)}; known: {', '.join(_ROLES)}")
    calls = fields.get("tool_calls")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"message {position} ({role}) has content {_short(content)}, which is not text")
    return Message(
        role=_ROLES[role],
        content=content,
        tool_calls=calls if isinstance(calls, str) or not calls else json.dumps(calls, ensure_ascii=False),
        tool_call_id=fields.get("tool_call_id"),
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
