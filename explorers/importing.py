"""Finished dialogues from a file as rollouts, for supervised fine-tuning and curation of what others wrote.

Ids and masks come from the model's own template, so an imported reply trains exactly as a sampled one would. Log-probs
are null: no model sampled these tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self, cast

import pyarrow as pa
from pydantic import Field, model_validator

from buffer_engine import schema
from buffer_engine.config import ComponentConfig
from buffer_engine.errors import RolloutError, TasksetError
from buffer_engine.identity import experience_id, group_id, stable_digest
from buffer_engine.store.base import Partition
from explorers.base import Engine, Message, Task
from explorers.task_rows import tasks_table
from explorers.tasksets.base import json_safe
from explorers.tasksets.messages import read_messages
from explorers.tasksets.row_source import jsonl_columns, parquet_columns, parse_object, read_lines, read_parquet

SHOWN_PROBLEMS = 10
"""Bad rows listed in an error; all of them are counted."""


class DialogueImport(ComponentConfig):
    """A JSONL or Parquet file of dialogues: messages (OpenAI), conversations (ShareGPT), or prompt and response."""

    path: str = Field(min_length=1, description="the file; .parquet is Parquet, everything else JSONL")
    format: Literal["auto", "messages", "conversations", "prompt_response"] = Field(
        "auto", description="auto: by the columns that are there"
    )
    messages: str | None = Field(None, description="column with the dialogue (default: messages or conversations)")
    prompt: str = Field("prompt", description="column with the prompt (format prompt_response)")
    response: str = Field("response", description="column with the reply (format prompt_response)")
    system: str | None = Field(None, description="system message put before every dialogue that has none")
    taskset: str = Field("import", min_length=1, description="task set name of the tasks made from the prompts")
    partition: Partition = Field("train", description="train or eval")
    on_error: Literal["raise", "skip"] = Field("raise", description="a bad row: refuse the file, or skip and count it")
    limit: int | None = Field(None, gt=0, description="import only the first dialogues")

    @model_validator(mode="after")
    def _column_fits(self) -> Self:
        if self.format == "prompt_response" and self.messages is not None:
            raise ValueError("messages names a dialogue column, which format prompt_response does not use")
        return self


@dataclass(frozen=True, slots=True)
class ImportedChunk:
    """Dialogues ready to append: append `tasks` and `rollouts` together.

    Attributes:
        skipped: reason → rows passed over since the chunk before.
        skipped_rows: one line per row passed over: where it is and why.
    """

    tasks: pa.Table
    rollouts: pa.Table
    events: pa.Table
    skipped: Mapping[str, int]
    skipped_rows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Dialogue:
    where: str
    messages: tuple[Message, ...]
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Bad:
    where: str
    reason: str
    message: str


def import_dialogues(
    config: DialogueImport, *, engine: Engine, run_id: str, chunk_rows: int = 256
) -> Iterator[ImportedChunk]:
    """Dialogues as tables, `chunk_rows` at a time; importing the same file again gives the same rows.

    Raises:
        TasksetError: the file is missing, empty or lacks its columns, or (with `on_error: raise`) rows are bad: the
            message lists the first with their lines. All rows are read once before the first chunk is yielded, so a
            malformed file is refused whole.
    """
    path = Path(config.path).expanduser()
    layout = _layout(config, path)
    if config.on_error == "raise":
        _refuse([found for found in _parsed(config, path, layout) if isinstance(found, _Bad)], path)
    builder = _Builder(config, engine, run_id)
    source = _parsed(config, path, layout)
    while batch := list(islice(source, chunk_rows)):
        chunk, bad = builder.chunk(batch)
        if config.on_error == "raise":
            _refuse(bad, path)
        yield chunk


def _refuse(bad: list[_Bad], path: Path) -> None:
    if bad:
        shown = "\n".join(f"  {one.where}: {one.message}" for one in bad[:SHOWN_PROBLEMS])
        more = f"\n  … and {len(bad) - SHOWN_PROBLEMS} more" if len(bad) > SHOWN_PROBLEMS else ""
        rows = "1 bad row" if len(bad) == 1 else f"{len(bad)} bad rows"
        raise TasksetError(f"{path} has {rows}:\n{shown}{more}\n→ mend them, or use on_error: skip")


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where a dialogue is in a row: one column of messages, or a prompt and a response."""

    dialogue: str | None
    used: frozenset[str]


def _layout(config: DialogueImport, path: Path) -> _Layout:
    columns = parquet_columns(path) if path.suffix == ".parquet" else jsonl_columns(path, skip_bad=True)
    listed = [config.messages] if config.messages else ["messages", "conversations"]
    wanted = {
        "auto": listed,
        "messages": [config.messages or "messages"],
        "conversations": [config.messages or "conversations"],
        "prompt_response": [],
    }[config.format]
    for name in wanted:
        if name in columns:
            return _Layout(name, frozenset({name}))
    pair = (config.prompt, config.response)
    if (
        config.format in ("auto", "prompt_response")
        and config.messages is None
        and all(name in columns for name in pair)
    ):
        return _Layout(None, frozenset(pair))
    expected = " or ".join([*map(repr, wanted), *([f"{pair[0]!r} and {pair[1]!r}"] if config.messages is None else [])])
    raise TasksetError(f"{path} has no column {expected} → it has {', '.join(sorted(columns))}; name the right ones")


def _rows(path: Path) -> Iterator[tuple[str, bytes | Mapping[str, Any]]]:
    """Rows with their place; lines of JSONL unparsed, so that one that is not JSON is a bad row like any other."""
    if path.suffix == ".parquet":
        yield from read_parquet(path)
    else:
        yield from read_lines(path)


def _parsed(config: DialogueImport, path: Path, layout: _Layout) -> Iterator[_Dialogue | _Bad]:
    for where, values in islice(_rows(path), config.limit):
        try:
            yield _read(config, layout, where, parse_object(values, where) if isinstance(values, bytes) else values)
        except ValueError as error:
            yield _Bad(where, "malformed", str(error))
        except TasksetError as error:
            yield _Bad(where, "malformed", str(error).removeprefix(f"{where}: "))


def _read(config: DialogueImport, layout: _Layout, where: str, values: Mapping[str, Any]) -> _Dialogue:
    if layout.dialogue is not None:
        if values.get(layout.dialogue) is None:
            raise ValueError(f"no column {layout.dialogue!r}, or null")
        messages = read_messages(values[layout.dialogue])
    else:
        texts = [values.get(config.prompt), values.get(config.response)]
        for name, text in zip((config.prompt, config.response), texts, strict=True):
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"column {name!r} should be text and is {text!r:.60}")
        prompt, response = cast("list[str]", texts)
        messages = (Message("user", prompt), Message("assistant", response))
    replies = [position for position, message in enumerate(messages) if message.role == "assistant"]
    if not replies:
        raise ValueError("the dialogue has no assistant turn")
    if replies[0] == 0:
        raise ValueError("the dialogue begins with an assistant turn")
    if config.system is not None and messages[0].role != "system":
        messages = (Message("system", config.system), *messages)
    info = {key: value for key, value in values.items() if key not in layout.used}
    return _Dialogue(where, messages, json_safe(info, where=where))


class _Builder:
    """Turns dialogues into rows and remembers how often each prompt came, because ids count repetitions."""

    def __init__(self, config: DialogueImport, engine: Engine, run_id: str) -> None:
        self._config = config
        self._engine = engine
        self._run_id = run_id
        self._visits: Counter[str] = Counter()

    def chunk(self, batch: list[_Dialogue | _Bad]) -> tuple[ImportedChunk, list[_Bad]]:
        tasks: dict[str, Task] = {}
        rollouts: list[dict[str, Any]] = []
        bad: list[_Bad] = []
        for found in batch:
            made = self._rollout(found) if isinstance(found, _Dialogue) else found
            if isinstance(made, _Bad):
                bad.append(made)
            else:
                task, row = made
                tasks[task.task_id] = task
                rollouts.append(row)
        counts = Counter(one.reason for one in bad)
        events = [
            {
                "run_id": self._run_id,
                "step": None,
                "kind": f"import_skipped_{reason}",
                "count": count,
                "experience_id": None,
                "detail": next(f"{one.where}: {one.message}" for one in bad if one.reason == reason),
                "recorded_at": datetime.now(UTC),
            }
            for reason, count in counts.items()
        ]
        chunk = ImportedChunk(
            tasks=tasks_table(list(tasks.values())),
            rollouts=pa.Table.from_pylist(rollouts, schema.ROLLOUTS.schema),
            events=pa.Table.from_pylist(events, schema.EVENTS.schema),
            skipped=dict(counts),
            skipped_rows=tuple(f"{one.where}: {one.message}" for one in bad),
        )
        return chunk, bad

    def _rollout(self, dialogue: _Dialogue) -> tuple[Task, dict[str, Any]] | _Bad:
        try:
            ids, mask = self._engine.encode_dialogue(dialogue.messages)
        except RolloutError as error:
            return _Bad(dialogue.where, error.kind, str(error))
        if len(ids) > self._engine.context_length:
            return _Bad(
                dialogue.where,
                "context",
                f"the dialogue has {len(ids)} tokens and the model's context holds {self._engine.context_length}",
            )
        first_reply = next(at for at, message in enumerate(dialogue.messages) if message.role == "assistant")
        prompt = dialogue.messages[:first_reply]
        config = self._config
        digest = stable_digest([message.as_dict() for message in prompt], dialogue.info)
        task = Task(f"{config.taskset}-{digest}", config.taskset, config.partition, prompt, dialogue.info)
        visit = self._visits[task.task_id]
        self._visits[task.task_id] += 1
        group = group_id(self._run_id, task.task_id, visit)
        row = {
            "experience_id": experience_id(self._run_id, task.task_id, group, 0, 0, 0),
            "parent_id": None,
            "made_by": "import",
            "run_id": self._run_id,
            "task_id": task.task_id,
            "group_id": group,
            "group_size": 1,
            "attempt": 0,
            "sample_index": 0,
            "turn_index": 0,
            "partition": config.partition,
            "explore_step": None,
            "model_version": None,
            "token_versions": [],
            "messages": [message.as_dict() for message in dialogue.messages],
            "token_ids": ids,
            "loss_mask": mask,
            "logprobs": None,
            "logprob_kind": None,
            "prompt_length": mask.index(True),
            "stop_reason": "imported",
            "eos_sampled": False,
            "truncated": False,
            "error": None,
            "sampling": None,
            "tokenizer_id": self._engine.tokenizer_id,
            "template_hash": self._engine.template_hash,
            "info_json": json.dumps({"source": dialogue.where}, ensure_ascii=False),
            "created_at": datetime.now(UTC),
        }
        return task, row
