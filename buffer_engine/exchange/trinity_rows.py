"""One experience of Trinity-RFT as rows of ours: which group and sample it is, its prompt, tokens and scores.

Trinity counts batch, task, run and step inside `eid`; rows of one batch and task are siblings. Where two rows say the
same run and step, they are taken for different samples.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import numpy as np

from buffer_engine.exchange.trinity_payload import Payload, Tensor
from buffer_engine.identity import experience_id, prompt_hash, stable_digest
from buffer_engine.store.base import Partition

AUTHOR = "trinity-rft"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LEFT_BEHIND = ("token_level_reward", "advantages", "returns", "teacher_logprobs", "routed_experts")
_Row = dict[str, Any]
_Sample = tuple[str, int]
"""The run that a row names, and which of the rows that name the same run and step it is."""


class NotARow(Exception):
    """An experience that cannot become a row; the text says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """What imported rows become part of, and the table that they come from."""

    table: str
    run_id: str
    taskset: str
    partition: Partition


@dataclass(frozen=True, slots=True)
class TrinityRow:
    """A row of the database: its id, payload, and the columns beside it, which count where both say something."""

    number: int
    payload: Payload
    columns: Mapping[str, Any]

    def eid(self, name: str) -> Any:
        """A part of the experience's id; None where it has none."""
        eid = self.payload.fields.get("eid")
        return cast("dict[str, Any]", eid).get(name) if isinstance(eid, dict) else None

    def value(self, column: str) -> Any:
        """What the column says, else the field of the same name."""
        found = self.columns.get(column)
        return self.payload.fields.get(column) if found is None else found


@dataclass(slots=True)
class Converted:
    """Rows made of one experience by table, and what of it has no place here."""

    tables: dict[str, list[_Row]] = field(default_factory=lambda: {"tasks": [], "rollouts": [], "scores": []})
    left: Counter[str] = field(default_factory=Counter[str])


@dataclass(slots=True)
class _Group:
    task_id: str
    first: int
    samples: dict[_Sample, list[tuple[Any, int]]] = field(default_factory=dict[_Sample, list[tuple[Any, int]]])


class Grouping:
    """Which group, sample and turn every row is; sees all rows once before any is converted."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._groups: dict[tuple[str, str], _Group] = {}
        self._seen: Counter[tuple[tuple[str, str], str, str]] = Counter()
        self._places: dict[int, tuple[tuple[str, str], _Sample]] = {}

    def see(self, row: TrinityRow) -> None:
        """Take note of a row; rows come in order of their id."""
        try:
            task_id, _ = _prompt(row, self.target)
        except NotARow:
            return
        batch, task = row.eid("batch"), row.columns.get("task_id")
        task = row.eid("task") if task is None else task
        # without a batch and a task nothing says which rows are siblings
        siblings = batch not in (None, "") and task not in (None, "")
        key = (str(batch), str(task)) if siblings else ("", f"row {row.number}")
        group = self._groups.setdefault(key, _Group(task_id, row.number))
        run, step = repr(row.eid("run")), row.eid("step")
        occurrence = self._seen[(key, run, repr(step))]
        self._seen[(key, run, repr(step))] += 1
        sample = (run, occurrence)
        group.samples.setdefault(sample, []).append((step, row.number))
        self._places[row.number] = (key, sample)

    def of(self, row: TrinityRow) -> tuple[str, str, int, int, int]:
        """Task id, group id, group size, sample index and turn index of a row that was seen."""
        key, sample = self._places[row.number]
        group = self._groups[key]
        turns = sorted(group.samples[sample], key=lambda turn: (_order(turn[0]), turn[1]))
        named = "g" + stable_digest(self.target.run_id, self.target.table, *key, group.task_id)
        position = list(group.samples).index(sample)
        return group.task_id, named, len(group.samples), position, [number for _, number in turns].index(row.number)

    def leads(self, row: TrinityRow) -> bool:
        """Whether the group's task is made from this row."""
        return self._groups[self._places[row.number][0]].first == row.number


def _order(step: Any) -> tuple[int, Any]:
    return (0, step) if isinstance(step, int) else (1, str(step))


def to_rows(row: TrinityRow, grouping: Grouping) -> Converted:
    """Rollouts, their scores, and the task when this is the first of its group.

    Raises:
        NotARow: lengths differ, a number is not finite, a field is not what it should be; says which.
    """
    _, prompt = _prompt(row, grouping.target)
    task_id, group, size, sample, turn = grouping.of(row)
    made = Converted()
    fields, tensors = row.payload.fields, row.payload.tensors
    if grouping.leads(row):
        made.tables["tasks"].append(_task(row, grouping.target, task_id, prompt))
    made.left.update(name for name in _LEFT_BEHIND if name in tensors)
    if fields.get("multi_modal_input_keys"):
        made.left["multi_modal_inputs"] += 1
    tokens = _ids(tensors.get("tokens"), "tokens")
    common = _common(row, grouping.target, task_id, group)
    if "chosen" in tensors or "rejected" in tensors:
        for at, name in enumerate(("chosen", "rejected")):
            reply = _ids(tensors.get(name), name)
            texts = fields.get(f"{name}_messages")
            messages = _messages(texts, f"{name}_messages") if texts else prompt
            rollout = common | {
                "experience_id": experience_id(grouping.target.run_id, task_id, group, 0, at, 0),
                "group_size": 2, "sample_index": at, "turn_index": 0, "messages": messages,
                "token_ids": tokens + reply, "loss_mask": [False] * len(tokens) + [True] * len(reply),
                "logprobs": None, "prompt_length": len(tokens), "token_versions": [],
            }  # fmt: skip
            made.tables["rollouts"].append(rollout)
            made.tables["scores"].append(_score(rollout, "preference", 1.0 - at, 1.0))
        return made
    length = _whole(fields.get("prompt_length"), "prompt_length")
    if not 0 <= length <= len(tokens):
        raise NotARow(f"prompt_length is {length} and there are {len(tokens)} tokens")
    replied = len(tokens) - length
    mask = _mask(tensors.get("action_mask"), replied)
    version = row.columns.get("model_version")
    info: Any = fields.get("info") or {}
    version = info.get("model_version") if version is None else version
    version = None if version is None else _whole(version, "model_version")
    rollout = common | {
        "experience_id": experience_id(grouping.target.run_id, task_id, group, 0, sample, turn),
        "group_size": size, "sample_index": sample, "turn_index": turn, "model_version": version,
        "token_versions": [] if version is None or not sum(mask) else [{"version": version, "length": sum(mask)}],
        "messages": _dialogue(row, prompt), "token_ids": tokens, "loss_mask": [False] * length + mask,
        "logprobs": _logprobs(tensors.get("logprobs"), length, mask), "prompt_length": length,
    }  # fmt: skip
    made.tables["rollouts"].append(rollout)
    reward = row.value("reward")
    if reward is not None:
        made.tables["scores"].append(_score(rollout, "reward", _finite(reward, "reward"), 1.0))
    for name, value in sorted((fields.get("metrics") or {}).items()):
        if isinstance(value, int | float):
            known = float(value) if math.isfinite(value) else None
            made.tables["scores"].append(_score(rollout, f"metrics/{name}", known, None))
    return made


def _prompt(row: TrinityRow, target: Target) -> tuple[str, list[_Row]]:
    """Task id and messages of the prompt: those before the first reply, else the prompt's text; may be without text."""
    fields = row.payload.fields
    given = fields.get("messages") or fields.get("chosen_messages")
    messages: list[_Row] = []
    if given:
        told = _messages(given, "messages")
        replies = [at for at, message in enumerate(told) if message["role"] == "assistant"]
        messages = told[: replies[0]] if replies else told
    elif fields.get("prompt_text"):
        messages = [_message("user", str(fields["prompt_text"]))]
    return f"{target.taskset}-{_prompt_digest(row, messages)}", messages


def _prompt_digest(row: TrinityRow, messages: Sequence[_Row]) -> str:
    """Hash of the prompt's text, or of its tokens where it has none."""
    if messages:
        return prompt_hash(messages)
    tokens = _ids(row.payload.tensors.get("tokens"), "tokens")
    if "chosen" in row.payload.tensors:
        return stable_digest("tokens", tokens)
    return stable_digest("tokens", tokens[: _whole(row.payload.fields.get("prompt_length"), "prompt_length")])


def _task(row: TrinityRow, target: Target, task_id: str, prompt: list[_Row]) -> _Row:
    return {
        "task_id": task_id, "taskset": target.taskset, "partition": target.partition, "messages": prompt,
        "prompt_hash": _prompt_digest(row, prompt), "info_json": "{}", "created_at": _when(row),
    }  # fmt: skip


def _common(row: TrinityRow, target: Target, task_id: str, group: str) -> _Row:
    fields = row.payload.fields
    kept = {name: fields.get(name) for name in ("eid", "info", "metrics", "truncate_status", "tools")}
    told = fields.get("messages") or []
    if any(set(message) - {"role", "content", "tool_calls", "tool_call_id"} for message in told):
        kept["messages"] = told  # fields that our messages have no place for
    info = {"trinity": _json({name: value for name, value in kept.items() if value})}
    return {
        "parent_id": None, "made_by": "import", "run_id": target.run_id, "task_id": task_id, "group_id": group,
        "attempt": 0, "partition": target.partition, "explore_step": None, "model_version": None,
        "logprob_kind": None, "stop_reason": "imported", "eos_sampled": False,
        "truncated": bool(fields.get("truncate_status")), "error": None, "sampling": None, "tokenizer_id": None,
        "template_hash": None, "info_json": json.dumps(info, ensure_ascii=False, sort_keys=True),
        "created_at": _when(row),
    }  # fmt: skip


def _dialogue(row: TrinityRow, prompt: list[_Row]) -> list[_Row]:
    fields = row.payload.fields
    told = _messages(fields["messages"], "messages") if fields.get("messages") else list(prompt)
    if fields.get("response_text") is not None and (not told or told[-1]["role"] != "assistant"):
        told.append(_message("assistant", str(fields["response_text"])))
    return told


def _messages(given: Any, name: str) -> list[_Row]:
    if not isinstance(given, list):
        raise NotARow(f"{name} is {type(given).__name__}; it must be a list")
    found: list[_Row] = []
    for at, entry in enumerate(cast("list[Any]", given)):
        if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
            raise NotARow(f"{name}[{at}] is no message with a role")
        message = cast("dict[str, Any]", entry)
        calls = message.get("tool_calls")
        found.append(
            _message(
                message["role"],
                _text(message.get("content"), f"{name}[{at}].content"),
                calls if isinstance(calls, str) or not calls else json.dumps(_json(calls), ensure_ascii=False),
                message.get("tool_call_id"),
            )
        )
    return found


def _message(role: str, content: str | None, calls: str | None = None, call_id: Any = None) -> _Row:
    told = None if call_id is None else str(call_id)
    return {"role": role, "content": content, "tool_calls": calls, "tool_call_id": told, "media": []}


def _text(content: Any, name: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        if all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            return "".join(str(part["text"]) for part in parts)
        raise NotARow(f"{name} has parts other than text, for which a message has no place")
    raise NotARow(f"{name} is {type(content).__name__}; it must be text")


def _score(rollout: _Row, name: str, value: float | None, weight: float | None) -> _Row:
    return {
        "experience_id": rollout["experience_id"], "name": name, "value": value, "weight": weight, "source": "import",
        "author": AUTHOR, "version": 1, "run_id": rollout["run_id"], "scored_at": rollout["created_at"],
        "comment": None,
    }  # fmt: skip


def _ids(tensor: Tensor | None, name: str) -> list[int]:
    if tensor is None:
        raise NotARow(f"there are no {name}")
    if tensor.ndim != 1 or tensor.dtype.kind not in "iu":
        raise NotARow(f"{name} is {tensor.dtype} of shape {tensor.shape}; it must be a list of whole numbers")
    if len(tensor) and (int(tensor.min()) < 0 or int(tensor.max()) >= 2**31):
        raise NotARow(f"{name} holds {int(tensor.min())} to {int(tensor.max())}, which do not fit int32")
    return tensor.tolist()


def _mask(tensor: Tensor | None, replied: int) -> list[bool]:
    """True where the policy sampled the token; without a mask of its own that is the whole reply."""
    if tensor is None:
        return [True] * replied
    if tensor.shape != (replied,):
        raise NotARow(f"action_mask has shape {tensor.shape} and the reply {replied} tokens")
    return (tensor != 0).tolist()


def _logprobs(tensor: Tensor | None, length: int, mask: list[bool]) -> list[float | None] | None:
    """Null where nothing was sampled: a placeholder there is no probability."""
    if tensor is None:
        return None
    if tensor.shape != (len(mask),):
        raise NotARow(f"logprobs has shape {tensor.shape} and the reply {len(mask)} tokens")
    values = tensor.astype(np.float32)
    if not np.isfinite(values[np.array(mask, dtype=bool)]).all():
        raise NotARow("logprobs of a sampled token are not finite")
    kept: list[float | None] = [
        value if sampled else None for value, sampled in zip(values.tolist(), mask, strict=True)
    ]
    return [None] * length + kept


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise NotARow(f"{name} is {value!r}; it must be a whole number")
    return value


def _finite(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise NotARow(f"{name} is {value!r}; it must be a finite number")
    return float(value)


def _when(row: TrinityRow) -> datetime:
    """The time of the row; SQLite's clock writes UTC. Without one, the epoch."""
    found = row.columns.get("timestamp")
    if found is None:
        return _EPOCH
    try:
        return datetime.fromisoformat(str(found)).replace(tzinfo=UTC)
    except ValueError as error:
        raise NotARow(f"timestamp is {found!r}; it must be a time") from error


def _json(value: Any) -> Any:
    """A value as JSON knows it: numbers that are not finite as text, bytes in hexadecimal."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): _json(one) for key, one in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_json(one) for one in cast("list[Any]", value)]
    return value
