"""Tasks from the rows of a file: JSONL and Parquet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from buffer_engine.errors import TasksetError, did_you_mean
from explorers.base import Message, Task
from explorers.placeholders import fill, placeholders
from explorers.tasksets.base import Item, TasksetConfig, build_tasks, json_safe
from explorers.tasksets.messages import read_messages
from explorers.tasksets.row_source import Row, jsonl_columns, parquet_columns, read_jsonl, read_parquet


class RowsConfig(TasksetConfig):
    """A file whose rows are tasks. The prompt is a text column, a column of messages, or a template over columns."""

    path: str = Field(min_length=1, description="the file")
    prompt: str | None = Field(None, description="column with the prompt's text (default: prompt)")
    messages: str | None = Field(None, description="column with chat messages, instead of prompt")
    template: str | None = Field(None, description="text of the user turn; {column} is replaced by the row's value")
    info: tuple[str, ...] | None = Field(
        None, description="columns that operators and workflows see; default: all except the prompt's"
    )

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if self.messages is not None and (self.prompt is not None or self.template is not None):
            raise ValueError("messages excludes prompt and template: give one")
        if self.template is not None and not placeholders(self.template):
            raise ValueError("template has no {column}, so all tasks would be the same")
        return self

    @property
    def prompt_columns(self) -> tuple[str, ...]:
        """Columns that the prompt is made of."""
        if self.messages is not None:
            return (self.messages,)
        if self.template is not None:
            named = sorted(placeholders(self.template))
            return tuple(dict.fromkeys([*([self.prompt] if self.prompt else []), *named]))
        return (self.prompt or "prompt",)


class JsonlConfig(RowsConfig):
    """A file with one JSON object per line."""

    type: Literal["jsonl"] = "jsonl"


class ParquetConfig(RowsConfig):
    """A Parquet file."""

    type: Literal["parquet"] = "parquet"


class _RowsTaskset:
    """What both kinds of file have in common; they differ in how rows and columns are read."""

    _read: ClassVar[Callable[[Path], Iterator[Row]]]
    _head: ClassVar[Callable[[Path], dict[str, str]]]

    def __init__(self, config: RowsConfig) -> None:
        self.config = config
        self._path = Path(config.path).expanduser()

    def columns(self) -> Mapping[str, str]:
        """Info columns from the head of the file; see `TaskSet.columns`."""
        found = type(self)._head(self._path)
        for name in (*self.config.prompt_columns, *(self.config.info or ())):
            if name not in found:
                raise TasksetError(f"{self._path} has no column {name!r} → {did_you_mean(name, found)}")
        return {name: kind for name, kind in found.items() if self._shown(name)}

    def load(self, name: str) -> list[Task]:
        """All tasks; see `TaskSet.load`.

        Raises:
            TasksetError: a row is malformed or lacks a column; names file and line.
        """
        self.columns()
        return build_tasks(name, self.config, self._items(type(self)._read(self._path)), where=str(self._path))

    def _shown(self, column: str) -> bool:
        if self.config.info is not None:
            return column in self.config.info
        # A template's columns stay visible (the gold answer may be among them); the prompt's own text is the task.
        return column not in (self.config.messages, self.config.prompt or "prompt")

    def _items(self, rows: Iterable[Row]) -> Iterator[Item]:
        for where, values in rows:
            source, messages = self._prompt(where, values)
            info = {key: value for key, value in values.items() if self._shown(key)}
            for column in self.config.info or ():
                self._value(where, values, column)
            yield Item(source, messages, json_safe(info, where=where))

    def _prompt(self, where: str, values: Mapping[str, Any]) -> tuple[object, tuple[Message, ...]]:
        config = self.config
        if config.messages is not None:
            try:
                messages = read_messages(self._value(where, values, config.messages))
            except ValueError as error:
                raise TasksetError(f"{where}: column {config.messages!r} {error}") from error
            if messages[-1].role == "assistant":
                raise TasksetError(
                    f"{where}: column {config.messages!r} ends with an assistant turn, so there is nothing to reply to "
                    "→ import finished dialogues instead, or cut the last turn"
                )
            return [(m.role, m.content) for m in messages if m.role != "system"], messages
        needed = {column: self._value(where, values, column) for column in config.prompt_columns}
        if config.template is not None:
            text = fill(config.template, needed)
            source: object = needed[config.prompt] if config.prompt else text
        else:
            source = text = needed[config.prompt_columns[0]]
        if not isinstance(text, str) or not text.strip():
            raise TasksetError(f"{where}: column {config.prompt_columns[0]!r} should be text and is {text!r:.60}")
        return source, (Message("user", text),)

    def _value(self, where: str, values: Mapping[str, Any], column: str) -> Any:
        if column not in values:
            raise TasksetError(f"{where}: no column {column!r} → {did_you_mean(column, values)}")
        if values[column] is None and column in self.config.prompt_columns:
            raise TasksetError(f"{where}: column {column!r} is null → give every row a prompt")
        return values[column]


class JsonlTaskset(_RowsTaskset):
    """Tasks from a JSONL file."""

    Config: ClassVar[type[JsonlConfig]] = JsonlConfig
    _read = staticmethod(read_jsonl)
    _head = staticmethod(jsonl_columns)


class ParquetTaskset(_RowsTaskset):
    """Tasks from a Parquet file."""

    Config: ClassVar[type[ParquetConfig]] = ParquetConfig
    _read = staticmethod(read_parquet)
    _head = staticmethod(parquet_columns)
