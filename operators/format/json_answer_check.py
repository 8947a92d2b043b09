"""json_answer_check: whether an answer holds JSON of a given form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import polars as pl
from pydantic import Field, model_validator

from buffer_engine.errors import OperatorError
from operators.base import Context, Contract, Operator, Result, ScoreOperatorConfig
from operators.json_schemas import BadSchemaError, NoJsonError, first_error, last_json, strict_json, validator


class JsonAnswerCheckConfig(ScoreOperatorConfig):
    """Where the JSON is and what it must look like."""

    weight: float = Field(0.0, description="share of the component in the reward; 0 makes it a metric only")
    column: str = Field("response", description="text column")
    extract: Literal["whole", "any"] = Field(
        "any", description="whole: the text is the JSON; any: else the last fenced block, else the last object or array"
    )
    json_schema: Mapping[str, Any] | None = Field(None, description="JSON schema; null: any JSON is fine")
    schema_file: str | None = Field(None, description="file with the JSON schema, in place of `json_schema`")
    into: str | None = Field(None, description="new column for the JSON found, as compact text; null: none")

    @model_validator(mode="after")
    def _one_schema(self) -> JsonAnswerCheckConfig:
        if self.json_schema is not None and self.schema_file is not None:
            raise ValueError("give either json_schema or schema_file")
        return self


class JsonAnswerCheck(Operator[JsonAnswerCheckConfig]):
    """Scores 1 where the text holds JSON that satisfies the schema, else 0; null text cannot be scored.

    What is wrong is the comment of the score: that there is no JSON, or the first place that breaks the schema. NaN and
    Infinity are not JSON. References in the schema to other documents are not followed. A schema that is none stops
    the pass before its first row.
    """

    Config = JsonAnswerCheckConfig
    requires = (("jsonschema_rs", "schema"),)

    def __init__(self, config: JsonAnswerCheckConfig) -> None:
        super().__init__(config)
        self._validator: Any = None

    def contract(self) -> Contract:
        """Reads the column; scores its own component; may write the JSON."""
        writes = {} if self.config.into is None else {self.config.into: pl.String()}
        return Contract(
            reads=frozenset((self.config.column,)), writes=writes, scores=(self.config.name,), cost="python"
        )

    def files(self) -> tuple[Path, ...]:
        """The schema's file, if it has one."""
        return () if self.config.schema_file is None else (Path(self.config.schema_file).expanduser(),)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Find and check the JSON of every row."""
        validate = self._schema()
        values: list[float | None] = []
        found: list[str | None] = []
        comments: dict[int, str] = {}
        # A Python loop: JSON has no vectorised form when its shape is not known.
        for row, text in enumerate(frame[self.config.column]):
            if text is None:
                values.append(None)
                found.append(None)
                continue
            try:
                value = strict_json(text) if self.config.extract == "whole" else last_json(text)
                problem = None if validate is None else first_error(validate, value)
                found.append(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
            except NoJsonError as error:
                problem = str(error)
                found.append(None)
            values.append(float(problem is None))
            if problem is not None:
                comments[row] = problem
        name, into = self.config.name, self.config.into
        return Result(
            columns={} if into is None else {into: pl.Series(into, found, pl.String)},
            scores={name: pl.Series(name, values, pl.Float64)},
            comments=comments,
        )

    def _schema(self) -> Any:
        if self._validator is None and (self.config.json_schema is not None or self.config.schema_file is not None):
            schema: Any = self.config.json_schema
            if self.config.schema_file is not None:
                schema = json.loads(self.files()[0].read_text(encoding="utf-8"))
            try:
                self._validator = validator(schema, name=f"`json_schema` of operator {self.config.name!r}")
            except BadSchemaError as error:
                raise OperatorError(str(error)) from error
        return self._validator
