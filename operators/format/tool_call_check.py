"""tool_call_check: whether the tools that a model calls exist and take what it gives them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import polars as pl
from pydantic import Field, model_validator

from operators.base import Context, Contract, Operator, Result, RowError, ScoreOperatorConfig
from operators.json_schemas import NoJsonError, first_error, strict_json, validator

_Validators = dict[str, Any]


class ToolCallCheckConfig(ScoreOperatorConfig):
    """Where the tools are described and where the calls are."""

    weight: float = Field(0.0, description="share of the component in the reward; 0 makes it a metric only")
    tools_column: str | None = Field(None, description="column with the task's tools: a JSON list in OpenAI's form")
    tools_file: str | None = Field(None, description="file with such a list, the same for every row")
    calls: Literal["messages", "tags"] = Field(
        "messages", description="messages: the field tool_calls; tags: JSON between tags in the assistant's text"
    )
    tags: tuple[str, str] = Field(("<tool_call>", "</tool_call>"), description="text around a call, for calls: tags")

    @model_validator(mode="after")
    def _one_source(self) -> ToolCallCheckConfig:
        if (self.tools_column is None) == (self.tools_file is None):
            raise ValueError("give either tools_column or tools_file")
        return self


class ToolCallCheck(Operator[ToolCallCheckConfig]):
    """Scores 1 where every tool call of the dialogue is valid and 0 where one is not; null where none is made.

    A call is valid when it names a tool of the list and its arguments, a JSON object or the text of one, satisfy that
    tool's `parameters` (a tool without them takes any object). A list of calls that is not JSON, and a tag that never
    closes, count as one call that is not valid. The metrics `_calls` and `_valid` beside the score count them; the
    comment says what is wrong with the first bad one. A row whose list of tools cannot be read is an error of that row;
    null means no tools.
    """

    Config = ToolCallCheckConfig
    requires = (("jsonschema_rs", "schema"),)

    def __init__(self, config: ToolCallCheckConfig) -> None:
        super().__init__(config)
        self._known: dict[str, _Validators] = {}

    def contract(self) -> Contract:
        """Reads dialogues and tools; scores its component and two counts."""
        name = self.config.name
        column = () if self.config.tools_column is None else (self.config.tools_column,)
        return Contract(
            reads=frozenset(("messages", *column)), scores=(name, f"{name}_calls", f"{name}_valid"), cost="python"
        )

    def files(self) -> tuple[Path, ...]:
        """The file with the tools, if there is one."""
        return () if self.config.tools_file is None else (Path(self.config.tools_file).expanduser(),)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Check every call of every row."""
        if self.config.tools_column is None:
            tools = [self.files()[0].read_text(encoding="utf-8")] * frame.height
        else:
            tools = frame[self.config.tools_column].cast(pl.String).to_list()
        counts: list[tuple[float, float] | None] = []
        comments: dict[int, str] = {}
        errors: list[RowError] = []
        # A Python loop: calls are JSON of any shape, a few to a dialogue.
        for row, (messages, text) in enumerate(zip(frame["messages"], tools, strict=True)):
            calls = [call for message in messages if message["role"] == "assistant" for call in self._calls(message)]
            try:
                validators = self._tools(text)
            except ValueError as error:
                errors.append(RowError(row, f"the list of tools cannot be read: {error}"))
                counts.append(None)
                continue
            problems = [_problem(call, validators) for call in calls]
            bad = [problem for problem in problems if problem is not None]
            counts.append((float(len(calls)), float(len(calls) - len(bad))))
            if bad:
                comments[row] = bad[0]
        return Result(scores=self._scores(counts), comments=comments, errors=errors)

    def _scores(self, counts: list[tuple[float, float] | None]) -> dict[str, pl.Series]:
        name = self.config.name
        right = [None if pair is None or pair[0] == 0 else float(pair[0] == pair[1]) for pair in counts]
        return {
            name: pl.Series(name, right, pl.Float64),
            f"{name}_calls": pl.Series(
                f"{name}_calls", [None if pair is None else pair[0] for pair in counts], pl.Float64
            ),
            f"{name}_valid": pl.Series(
                f"{name}_valid", [None if pair is None else pair[1] for pair in counts], pl.Float64
            ),
        }

    def _tools(self, text: str | None) -> _Validators:
        """Validators by tool name."""
        text = "[]" if text is None else text
        if text not in self._known:
            tools = strict_json(text)
            if not isinstance(tools, list):
                raise ValueError("not a list")
            self._known[text] = dict(_tool(tool) for tool in tools)
        return self._known[text]

    def _calls(self, message: dict[str, Any]) -> list[Any]:
        """Calls of an assistant message; what cannot be read stands as its text."""
        if self.config.calls == "messages":
            if message["tool_calls"] is None:
                return []
            try:
                calls = strict_json(message["tool_calls"])
            except NoJsonError:
                return [message["tool_calls"]]
            return calls if isinstance(calls, list) else [calls]
        opening, closing = (re.escape(tag) for tag in self.config.tags)
        found: list[Any] = []
        for body, closed in re.findall(rf"(?s){opening}(.*?)({closing}|\Z)", message["content"] or ""):
            try:
                found.append(strict_json(body) if closed else body)
            except NoJsonError:
                found.append(body)
        return found


def _tool(tool: Any) -> tuple[str, Any]:
    """Name and validator of one described tool."""
    function: Any = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool without a name: {json.dumps(tool)[:80]}")
    name: str = function["name"]
    return name, validator(function.get("parameters") or {"type": "object"}, name=f"`parameters` of tool {name!r}")


def _problem(call: Any, tools: _Validators) -> str | None:
    """What is wrong with a call; None: nothing."""
    if not isinstance(call, dict):
        return "a call is not a JSON object"
    function: Any = call.get("function", call)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        return "a call names no tool"
    if name not in tools:
        return f"there is no tool {name!r}"
    arguments: Any = function.get("arguments", {})
    try:
        value = strict_json(arguments) if isinstance(arguments, str) else arguments
    except NoJsonError as error:
        return f"arguments of {name}: {error}"
    if not isinstance(value, dict):
        return f"arguments of {name} are no JSON object"
    problem = first_error(tools[name], value)
    return None if problem is None else f"arguments of {name}: {problem}"
