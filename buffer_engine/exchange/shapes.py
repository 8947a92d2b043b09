"""Dialogues in the shapes that trainers of the TRL family read: messages, prompt and completion, preference pairs.

Column names are those of TRL's page "Dataset formats and types" (conversational form). Only rows that somebody may
train on are taken: without error, of one partition, and fulfilling the condition, by default kept by curation.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.errors import ExchangeError, UsageError, did_you_mean
from buffer_engine.exchange.pairs import PAIR_COLUMNS, choose_pairs
from buffer_engine.exchange.relations import FETCHED_ROWS, Extraction, Relation
from buffer_engine.identity import prompt_hash
from buffer_engine.store.base import Partition

ShapeName = Literal["sft", "prompt_completion", "preference"]
TOOL_FIELDS = ("tool_calls", "tool_call_id")
KEPT = "status = 'kept'"
"""Condition when none is given: what curation kept."""

_CALL = pa.struct(
    [
        pa.field("id", pa.string()),
        pa.field("type", pa.string()),
        pa.field("function", pa.struct([pa.field("name", pa.string()), pa.field("arguments", pa.string())])),
    ]
)
CHAT = pa.list_(
    pa.struct(
        [
            pa.field("role", pa.string()),
            pa.field("content", pa.string()),
            pa.field("tool_calls", pa.list_(_CALL)),
            pa.field("tool_call_id", pa.string()),
        ]
    )
)
"""A dialogue; the two fields about tools are left out of an export in which no message has them."""

_PLAIN_CHAT = pa.list_(pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string())]))
_Dialogue = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Shape:
    """What to make of the rollouts.

    Attributes:
        where: condition over the view `experiences`; None: `KEPT`.
        columns: columns of `experiences` to carry along; of pairs, some of `PAIR_COLUMNS`.
        margin: preference: least difference of rewards between chosen and rejected; 0: any difference.
        pairs_per_group: preference: most pairs of one group, those furthest apart first; 0: all.
    """

    name: ShapeName
    where: str | None = None
    partition: Partition = "train"
    columns: tuple[str, ...] = ()
    margin: float = 0.0
    pairs_per_group: int = 1


@dataclass(slots=True)
class ShapeReport:
    """What was passed over, known when the relation has been read to its end.

    Attributes:
        passed_over: reason → rows (of preference: groups) that gave nothing.
        media: references to attachments in the dialogues written; the shapes have no place for them.
    """

    passed_over: dict[str, int] = field(default_factory=dict[str, int])
    media: set[str] = field(default_factory=set[str])

    def count(self, reason: str, rows: int = 1) -> None:
        """Note rows that gave nothing."""
        if rows:
            self.passed_over[reason] = self.passed_over.get(reason, 0) + rows


@contextmanager
def open_shape(extraction: Extraction, shape: Shape, report: ShapeReport) -> Generator[Relation]:
    """The relation of a shape, in order of arrival (pairs: by group).

    Raises:
        UsageError: a column cannot be carried along.
        ExchangeError: tool calls of a message are not the JSON that they should be; names the row.
    """
    condition = f"error IS NULL AND partition = '{shape.partition}' AND (\n{shape.where or KEPT}\n)"
    reader = _Reader(extraction, report)
    if shape.name == "preference":
        for name in shape.columns:
            if name not in PAIR_COLUMNS:
                raise UsageError(f"pairs have no column {name!r}: {did_you_mean(name, PAIR_COLUMNS)}")
        pairs = choose_pairs(extraction, condition, shape, report)
        chat = reader.chat_type([one for pair in pairs for one in (pair["chosen_id"], pair["rejected_id"])])
        extra = [pa.field(name, PAIR_COLUMNS[name]) for name in shape.columns]
        schema = pa.schema([pa.field(name, chat) for name in ("prompt", "chosen", "rejected")] + extra)
        yield Relation(schema, reader.pairs(pairs, schema), len(pairs))
        return
    names = ("messages",) if shape.name == "sft" else ("prompt", "completion")
    picked = _picked(extraction, condition, shape.columns, names)
    chat = reader.chat_type(picked.column(0).to_pylist())
    schema = pa.schema([*(pa.field(name, chat) for name in names), *list(picked.schema)[1:]])
    yield Relation(schema, reader.dialogues(picked, schema, whole=shape.name == "sft"), picked.num_rows)


def _picked(extraction: Extraction, condition: str, columns: Sequence[str], own: Sequence[str]) -> pa.Table:
    """Id and carried columns of the rows that fulfil the condition, in order of arrival."""
    known = [name for name, _ in extraction.inspection.columns("experiences")]
    for name in columns:
        if name not in known:
            raise UsageError(f"the view experiences has no column {name!r}: {did_you_mean(name, known)}")
        if name in own:
            raise UsageError(f"the shape has a column {name!r} of its own; carry along others")
    carried = "".join(f', "{name}"' for name in columns)
    return extraction.inspection.query(
        f"SELECT experience_id AS _id{carried} FROM experiences WHERE {condition} ORDER BY sequence"
    )


class _Reader:
    """Dialogues of rollouts, a few at a time."""

    def __init__(self, extraction: Extraction, report: ShapeReport) -> None:
        self._extraction = extraction
        self._report = report
        self._tasks: dict[str, tuple[int, str]] | None = None

    def chat_type(self, ids: Sequence[str]) -> pa.DataType:
        """The type of a dialogue: with tools when any message of these rows has them."""
        for rows in self._read(ids, ["messages"]):
            messages = pc.list_flatten(rows.column("messages"))
            if any(pc.struct_field(messages, name).null_count < len(messages) for name in TOOL_FIELDS):
                return CHAT
        return _PLAIN_CHAT

    def dialogues(self, picked: pa.Table, schema: pa.Schema, *, whole: bool) -> Iterator[pa.RecordBatch]:
        """Rows of `sft` (whole) or `prompt_completion`; those without a reply at the end are counted.

        Args:
            picked: the ids, then the columns to carry along.
        """
        carried: pa.Table = picked.select(picked.column_names[1:])
        at = 0
        for rows in self._read(picked.column(0).to_pylist(), ["experience_id", "task_id", "messages"]):
            beside = carried.slice(at, rows.num_rows)
            at += rows.num_rows
            made: list[dict[str, _Dialogue]] = []
            kept: list[int] = []
            for number, (row, length) in enumerate(zip(rows.to_pylist(), self._prompt_lengths(rows), strict=True)):
                dialogue = self._dialogue(row)
                if dialogue is None or not 0 < length < len(dialogue):
                    self._report.count("no_reply")
                    continue
                self._report.media |= _media(row)
                made.append({"messages": dialogue} if whole else _split(dialogue, length, "completion"))
                kept.append(number)
            if made:
                columns = [pa.array([row[name] for row in made], schema.field(name).type) for name in made[0]]
                columns += beside.take(pa.array(kept, pa.int64())).columns
                yield from pa.Table.from_arrays(columns, schema=schema).to_batches()

    def pairs(self, pairs: Sequence[dict[str, Any]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Rows of `preference`."""
        for at in range(0, len(pairs), FETCHED_ROWS // 2):
            part = pairs[at : at + FETCHED_ROWS // 2]
            ids = list(dict.fromkeys(one for pair in part for one in (pair["chosen_id"], pair["rejected_id"])))
            found: dict[str, tuple[_Dialogue | None, int]] = {}
            media: dict[str, set[str]] = {}
            for rows in self._read(ids, ["experience_id", "task_id", "messages"]):
                for row, length in zip(rows.to_pylist(), self._prompt_lengths(rows), strict=True):
                    found[row["experience_id"]] = (self._dialogue(row), length)
                    media[row["experience_id"]] = _media(row)
            made: list[dict[str, Any]] = []
            for pair in part:
                (chosen, length), (rejected, other) = found[pair["chosen_id"]], found[pair["rejected_id"]]
                if chosen is None or rejected is None or not (0 < length < len(chosen) and other < len(rejected)):
                    self._report.count("no_reply")
                elif length != other or chosen[:length] != rejected[:length]:
                    self._report.count("prompts_differ")
                elif chosen == rejected:
                    self._report.count("same_text")
                else:
                    self._report.media |= media[pair["chosen_id"]] | media[pair["rejected_id"]]
                    made.append(_split(chosen, length, "chosen") | {"rejected": rejected[length:]} | pair)
            if made:
                kept = [{name: row[name] for name in schema.names} for row in made]
                yield from pa.Table.from_pylist(kept, schema=schema).to_batches()

    def _read(self, ids: Sequence[str], columns: Sequence[str]) -> Iterator[pa.Table]:
        for at in range(0, len(ids), FETCHED_ROWS):
            yield self._extraction.store.fetch(ids[at : at + FETCHED_ROWS], columns=columns)

    def _prompt_lengths(self, rows: pa.Table) -> list[int]:
        """How many messages of each row were given to the policy: those of its task, else all before its first reply.

        A task may show example replies, so the first reply is not always the policy's.
        """
        tasks = self._prompts()
        lengths: list[int] = []
        for task_id, messages in zip(
            rows.column("task_id").to_pylist(), rows.column("messages").to_pylist(), strict=True
        ):
            given, digest = tasks.get(task_id, (0, ""))
            if given and prompt_hash(messages[:given]) == digest:
                lengths.append(given)
            else:
                replies = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
                lengths.append(replies[0] if replies else 0)
        return lengths

    def _prompts(self) -> dict[str, tuple[int, str]]:
        """How many messages each task has, and their hash."""
        if self._tasks is None:
            self._tasks = {}
            for batch in self._extraction.store.scan(
                "tasks", until=self._extraction.version, columns=["task_id", "messages"]
            ):
                for task_id, messages in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    self._tasks[task_id] = (len(messages), prompt_hash(messages))
        return self._tasks

    def _dialogue(self, row: dict[str, Any]) -> _Dialogue | None:
        """The row's messages for a trainer; None when they do not end with a reply."""
        messages = row["messages"]
        if not messages or messages[-1]["role"] != "assistant":
            return None
        return [
            {
                "role": message["role"],
                "content": message["content"],
                "tool_calls": _calls(message["tool_calls"], row["experience_id"]),
                "tool_call_id": message["tool_call_id"],
            }
            for message in messages
        ]


def _media(row: dict[str, Any]) -> set[str]:
    return {one for message in row["messages"] for one in message["media"] or ()}


def _split(dialogue: _Dialogue, length: int, reply: str) -> dict[str, _Dialogue]:
    return {"prompt": dialogue[:length], reply: dialogue[length:]}


def _calls(text: str | None, experience_id: str) -> list[dict[str, Any]] | None:
    """Tool calls as OpenAI writes them: id, type, and function with name and arguments (JSON text)."""
    if text is None:
        return None
    try:
        calls = json.loads(text)
        return [_call(call) for call in calls]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ExchangeError(
            f"experience_id={experience_id!r}: tool_calls is {text[:80]!r}, which is not a JSON list of calls with a "
            "function's name and arguments; export the table rollouts instead"
        ) from error


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function["arguments"]
    return {
        "id": call.get("id"),
        "type": call.get("type", "function"),
        "function": {
            "name": function["name"],
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
        },
    }
