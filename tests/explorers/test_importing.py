"""Dialogues from files: three layouts, ids and masks, bad rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from buffer_engine import schema
from buffer_engine.errors import TasksetError
from explorers.importing import DialogueImport, ImportedChunk, import_dialogues
from explorers.models.scripted import END, ScriptedConfig, ScriptedEngine

OPENAI = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "an"}], "topic": "x"}
SHAREGPT = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "an"}], "topic": "x"}
PAIR = {"prompt": "q", "response": "an", "topic": "x"}
BAD = [
    {"messages": []},
    {"messages": [{"role": "user", "content": "q"}]},
    {"messages": [{"role": "assistant", "content": "a"}]},
    {"messages": [{"role": "user", "content": "q"}, {"role": "robot", "content": "a"}]},
    {"messages": None},
]


def engine(**options: Any) -> ScriptedEngine:
    return ScriptedEngine(ScriptedConfig.model_validate({"replies": ["ok"], **options}))


def imported(folder: Path, lines: list[Any], *, model: ScriptedEngine | None = None, **options: Any):
    path = folder / "dialogues.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    config = DialogueImport.model_validate({"path": str(path), **options})
    return list(import_dialogues(config, engine=model or engine(), run_id="r"))


def only(chunks: list[ImportedChunk]) -> ImportedChunk:
    (chunk,) = chunks
    return chunk


@pytest.mark.parametrize("line", [OPENAI, SHAREGPT, PAIR])
def test_every_layout_gives_the_same_row(tmp_path: Path, line):
    chunk = only(imported(tmp_path, [line]))
    assert chunk.rollouts.schema == schema.ROLLOUTS.schema
    (row,) = chunk.rollouts.to_pylist()
    assert [message["content"] for message in row["messages"]] == ["q", "an"]
    # start "user\n" "q" end = 8, start "assistant\n" = 11, then a, n, end.
    assert row["prompt_length"] == 19
    assert row["loss_mask"] == [False] * 19 + [True] * 3
    assert row["token_ids"][-1] == END
    assert (row["made_by"], row["stop_reason"], row["logprobs"], row["group_size"]) == ("import", "imported", None, 1)
    (task,) = chunk.tasks.to_pylist()
    assert (task["task_id"], json.loads(task["info_json"])) == (row["task_id"], {"topic": "x"})
    assert [message["content"] for message in task["messages"]] == ["q"]


def test_importing_again_gives_the_same_rows(tmp_path: Path):
    first, again = (only(imported(tmp_path, [OPENAI, PAIR | OPENAI])).rollouts.drop(["created_at"]) for _ in range(2))
    assert first.equals(again)


def test_one_prompt_with_two_replies_is_one_task_and_two_groups(tmp_path: Path):
    chunk = only(imported(tmp_path, [PAIR, PAIR | {"response": "other"}]))
    assert chunk.tasks.num_rows == 1
    rows = chunk.rollouts.to_pylist()
    assert rows[0]["task_id"] == rows[1]["task_id"]
    assert rows[0]["group_id"] != rows[1]["group_id"]
    assert rows[0]["experience_id"] != rows[1]["experience_id"]


def test_all_replies_of_a_longer_dialogue_train_and_the_task_is_what_came_before_the_first(tmp_path: Path):
    turns = [("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "bc")]
    line = {"messages": [{"role": role, "content": content} for role, content in turns]}
    chunk = only(imported(tmp_path, [line]))
    assert sum(chunk.rollouts.to_pylist()[0]["loss_mask"]) == 2 + 3
    assert [message["role"] for message in chunk.tasks.to_pylist()[0]["messages"]] == ["system", "user"]


def test_a_parquet_file_gives_the_same_ids(tmp_path: Path):
    pq.write_table(pa.Table.from_pylist([OPENAI]), tmp_path / "d.parquet")
    config = DialogueImport(path=str(tmp_path / "d.parquet"))
    (chunk,) = import_dialogues(config, engine=engine(), run_id="r")
    lines = only(imported(tmp_path, [OPENAI]))
    assert chunk.rollouts["token_ids"].to_pylist() == lines.rollouts["token_ids"].to_pylist()


def test_bad_rows_refuse_the_file_with_all_their_lines(tmp_path: Path):
    with pytest.raises(TasksetError) as caught:
        imported(tmp_path, [OPENAI, *BAD, '{"messages'])
    text = str(caught.value)
    assert "has 6 bad rows" in text
    for line, words in [
        (2, "is an empty list of messages"),
        (3, "the dialogue has no assistant turn"),
        (4, "the dialogue begins with an assistant turn"),
        (5, "message 1 has role 'robot'"),
        (6, "no column 'messages', or null"),
        (7, "not JSON"),
    ]:
        assert f"dialogues.jsonl:{line}: " in text
        assert words in text


def test_bad_rows_are_skipped_and_counted_when_asked(tmp_path: Path):
    chunk = only(imported(tmp_path, ["{", OPENAI, *BAD, PAIR | OPENAI], on_error="skip"))
    assert chunk.rollouts.num_rows == 2
    assert chunk.skipped == {"malformed": 6}
    (event,) = chunk.events.to_pylist()
    assert (event["kind"], event["count"]) == ("import_skipped_malformed", 6)
    assert "dialogues.jsonl:1" in event["detail"]


def test_a_dialogue_beyond_the_context_is_never_cut(tmp_path: Path):
    lines = [PAIR, PAIR | {"response": "x" * 50}]
    with pytest.raises(TasksetError, match=r"dialogues.jsonl:2: the dialogue has 70 tokens and .* holds 40"):
        imported(tmp_path, lines, model=engine(context_length=40))
    chunk = only(imported(tmp_path, lines, model=engine(context_length=40), on_error="skip"))
    assert chunk.skipped == {"context": 1}


def test_chunks_have_the_rows_asked_for(tmp_path: Path):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(PAIR | {"prompt": str(n)}) + "\n" for n in range(5)))
    config = DialogueImport(path=str(path), limit=4)
    chunks = list(import_dialogues(config, engine=engine(), run_id="r", chunk_rows=3))
    assert [chunk.rollouts.num_rows for chunk in chunks] == [3, 1]


def test_a_file_without_the_columns_says_what_it_has(tmp_path: Path):
    with pytest.raises(TasksetError, match="'messages' or 'conversations' or 'prompt' and 'response' → it has chosen"):
        imported(tmp_path, [{"chosen": "x"}])
    with pytest.raises(TasksetError, match="no column 'dialog'"):
        imported(tmp_path, [OPENAI], messages="dialog")
    with pytest.raises(ValidationError):
        DialogueImport(path="x", format="prompt_response", messages="m")
