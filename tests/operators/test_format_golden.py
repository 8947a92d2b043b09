"""Operators that check the form of rows, on rows small enough to check by hand."""

from __future__ import annotations

import json
from typing import Any

import polars as pl
import pytest
from operator_rows import apply, config, details, frame, message, reasons
from pydantic import ValidationError

from buffer_engine.errors import ConfigError, OperatorError
from operators.frame import MESSAGES
from operators.json_schemas import NoJsonError, last_json, strict_json
from operators.plan import compile_operators, fingerprint
from operators.registry import OPERATORS


def test_schema_check_names_the_first_broken_rule():
    rows = frame(
        {
            "level": [3, 7, 3, None, 3, 3],
            "answer": ["12", "12", "x", "12", "1234", "12"],
            "kind": ["a", "a", "a", "a", "a", "b"],
            "p": [0.5, 0.5, 0.5, 0.5, 0.5, float("nan")],
        }
    )
    columns = {
        "level": {"type": "integer", "min": 1, "max": 5},
        "answer": {"type": "text", "pattern": r"\d+", "max": 3},
        "kind": {"choices": ["a"]},
        "p": {"type": "number", "nullable": True},
    }
    result = apply("schema_check", rows, columns=columns)
    assert reasons(result) == {1: "too_large", 2: "pattern", 3: "null", 4: "too_long", 5: "not_a_choice"}
    assert details(result) == {
        1: "level is 7, max 5",
        2: r"answer does not match \d+",
        3: "level is null",
        4: "answer is 4 characters, max 3",
        5: "kind is b, not one of 1 values",
    }
    assert reasons(apply("schema_check", rows, columns={"p": {}})) == {5: "null"}


def test_schema_check_finds_a_wrong_type_before_any_row():
    check = config("schema_check", columns={"level": {"type": "text"}})
    with pytest.raises(ConfigError, match="column 'level' is Int64, not text"):
        compile_operators([check], available={"level": pl.Int64()})
    with pytest.raises(ValidationError, match="no row could stay"):
        config("schema_check", columns={"level": {"min": 2, "max": 1}})


def call(call_id: str, name: str = "add", arguments: Any = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return message("assistant", content) | {"tool_calls": json.dumps(calls)}


def result_of(call_id: str | None) -> dict[str, Any]:
    return message("tool", "3") | {"tool_call_id": call_id}


U, A, S = message("user", "u"), message("assistant", "a"), message("system", "s")


@pytest.mark.parametrize(
    ("dialogue", "fields", "expected"),
    [
        ([S, U, A, U, A], {}, None),
        ([U, calling(call("c1"), call("c2")), result_of("c2"), result_of("c1"), A], {}, None),
        ([], {}, ("no_messages", None)),
        ([A, U, A], {}, ("order", "message 0")),
        ([U, U, A], {}, ("order", "message 1")),
        ([U, A, A], {}, ("order", "message 2")),
        ([U, S, A], {}, ("role", "message 1")),
        ([S, A], {}, ("order", "message 1")),
        ([U, message("critic", "x")], {}, ("role", "message 1")),
        ([U, A, U], {}, ("last", "message 2")),
        ([U, A, U], {"last": ["user"]}, None),
        ([U, message("assistant", " \n")], {}, ("empty", "message 1")),
        ([U, message("assistant", None)], {"allow_empty": True}, None),
        ([U, U, A], {"alternate": False}, None),
        ([U, result_of("c1"), A], {}, ("order", "message 1")),
        ([U, calling(call("c1")), result_of("c9"), A], {}, ("tool_result", "message 2")),
        ([U, calling(call("c1")), result_of(None), A], {}, ("tool_result", "message 2")),
        ([U, calling(call("c1")), result_of("c1"), result_of("c1"), A], {}, ("tool_result", "message 3")),
        ([U, calling(call("c1"), content="x"), U, A], {}, ("unanswered", "message 2")),
        ([U, calling(call("c1"))], {}, ("unanswered", "message 1")),
        ([U, calling(call("c1"))], {"open_calls": True}, None),
        ([U, calling(call("c1"), call("c1"))], {"open_calls": True}, ("tool_calls", "message 1")),
        ([U, A | {"tool_calls": "{"}], {}, ("tool_calls", "message 1")),
        ([U, A | {"tool_calls": '[{"id": 3}]'}], {}, ("tool_calls", "message 1")),
        ([U, A | {"tool_calls": "[]"}], {}, None),
    ],
)
def test_messages_check_gives_the_first_message_that_breaks_a_rule(dialogue, fields, expected):
    rows = frame({"messages": [dialogue, [U, A]]}, {"messages": MESSAGES})
    result = apply("messages_check", rows, **fields)
    assert result.verdicts is not None
    found = {row: (reason, detail) for row, _, reason, detail, _ in result.verdicts.rows()}
    assert found.get(0) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        ('first {"a": 1} then\n[1, 2] end', [1, 2]),
        ('```json\n{"a": 1}\n```\nand ```\n{"b": 2}\n``` {"c": 3}', {"b": 2}),
        ("```py\nx = {}\n``` so {}", {}),
        ('{"a": {"b": [1]}} trailing {', {"a": {"b": [1]}}),
        ("7", 7),
    ],
)
def test_last_json_finds_what_the_reply_ends_with(text, value):
    assert last_json(text) == value


@pytest.mark.parametrize("text", ["", "none", "{", "[" * 100_000, '{"a": NaN}', "Infinity"])
def test_what_is_no_json_is_none(text):
    with pytest.raises(NoJsonError):
        strict_json(text)
    with pytest.raises(NoJsonError):
        last_json(text)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_json_answer_check_scores_and_says_what_is_wrong():
    pytest.importorskip("jsonschema_rs")
    rows = frame({"response": ['so {"a": 1}', '{"a": "x"}', "nothing", None]}, {"response": pl.String})
    result = apply("json_answer_check", rows, id="form", json_schema=SCHEMA, into="parsed")
    assert result.scores["form"].to_list() == [1.0, 0.0, 0.0, None]
    assert result.columns["parsed"].to_list() == ['{"a":1}', '{"a":"x"}', None, None]
    assert result.comments == {1: 'a: "x" is not of type "integer"', 2: "no JSON in the text"}
    whole = apply("json_answer_check", rows, extract="whole", json_schema=SCHEMA)
    assert whole.scores["json_answer_check"].to_list() == [0.0, 0.0, 0.0, None]
    with pytest.raises(OperatorError, match="`json_schema` of operator 'json_answer_check' is not a JSON schema"):
        apply("json_answer_check", rows, json_schema={"type": "nonsense"})
    with pytest.raises(ValidationError, match="either json_schema or schema_file"):
        config("json_answer_check", json_schema=SCHEMA, schema_file="x.json")


def test_the_content_of_a_file_is_part_of_the_fingerprint(tmp_path):
    pytest.importorskip("jsonschema_rs")
    file = tmp_path / "schema.json"
    check = config("json_answer_check", schema_file=str(file))
    with pytest.raises(ConfigError, match=r"reads the file .*schema.json', which is not there") as caught:
        compile_operators([check], available={})
    assert caught.value.problems[0].path == "operators.0.schema_file"
    marks = set()
    for schema in (SCHEMA, {"type": "integer"}, SCHEMA):
        file.write_text(json.dumps(schema), encoding="utf-8")
        marks.add(fingerprint(OPERATORS.load("json_answer_check")(check)))
        compile_operators([check], available={})
    assert len(marks) == 2
    rows = frame({"response": ['{"a": 1}', "3"]})
    assert apply("json_answer_check", rows, schema_file=str(file)).scores["json_answer_check"].to_list() == [1.0, 0.0]


TOOLS = json.dumps(
    [
        {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
        {"name": "stop"},
    ]
)


def test_tool_call_check_holds_calls_against_the_tools():
    pytest.importorskip("jsonschema_rs")
    good, bad = call("c1", arguments='{"a": 1}'), call("c2", arguments='{"a": "x"}')
    dialogues = [
        [U, calling(good, call("c3", "stop"))],
        [U, calling(good, bad)],
        [U, A],
        [U, calling(call("c1", "fly")), calling(good)],
        [U, calling(call("c1", arguments="{"))],
        [U, A | {"tool_calls": "[{"}],
        [U, calling(call("c1", arguments={"a": 1}))],
        [U, calling(good)],
        [U, calling(good)],
    ]
    tools = [TOOLS] * 7 + [None, "no list"]
    rows = frame({"messages": dialogues, "tools": tools}, {"messages": MESSAGES, "tools": pl.String})
    result = apply("tool_call_check", rows, id="tools_ok", tools_column="tools")
    assert result.scores["tools_ok"].to_list() == [1.0, 0.0, None, 0.0, 0.0, 0.0, 1.0, 0.0, None]
    assert result.scores["tools_ok_calls"].to_list() == [2.0, 2.0, 0.0, 2.0, 1.0, 1.0, 1.0, 1.0, None]
    assert result.scores["tools_ok_valid"].to_list() == [2.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, None]
    assert result.comments[1] == 'arguments of add: a: "x" is not of type "integer"'
    assert result.comments[3] == "there is no tool 'fly'"
    assert result.comments[5] == "a call is not a JSON object"
    assert [error.row for error in result.errors] == [8]


def test_tool_call_check_reads_calls_between_tags(tmp_path):
    pytest.importorskip("jsonschema_rs")
    (tmp_path / "tools.json").write_text(TOOLS, encoding="utf-8")
    texts = [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> and <tool_call>{"name": "stop"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1}}',
        "<tool_call>add(1)</tool_call>",
        "none",
    ]
    rows = frame({"messages": [[U, message("assistant", text)] for text in texts]}, {"messages": MESSAGES})
    result = apply("tool_call_check", rows, tools_file=str(tmp_path / "tools.json"), calls="tags")
    assert result.scores["tool_call_check_calls"].to_list() == [2.0, 1.0, 1.0, 0.0]
    assert result.scores["tool_call_check"].to_list() == [1.0, 0.0, 0.0, None]
