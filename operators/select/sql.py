"""sql: rows chosen by DuckDB."""

from __future__ import annotations

import json
from typing import Annotated, Any

import duckdb
import polars as pl
from pydantic import AfterValidator, Field, model_validator

from operators.base import VERDICT_SCHEMA, Context, Contract, Operator, Result, ScoreOperatorConfig
from operators.expressions import refuse_aggregates

_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false",
    "python_enable_replacements": "false",
    "autoload_known_extensions": "false",
    "autoinstall_known_extensions": "false",
    "threads": "1",
}


_LONGEST_DETAIL = 120


def _condition(text: str) -> str:
    refuse_aggregates(text)
    _columns_of(text)
    return text


def _columns_of(condition: str) -> tuple[str, ...]:
    """Column names in a condition, from DuckDB's own parse of it."""
    with duckdb.connect(":memory:", config=_SETTINGS) as connection:
        answer = connection.execute("SELECT json_serialize_sql(?)", [f"SELECT ({condition}) FROM rows"]).fetchone()
    parsed: dict[str, Any] = json.loads(answer[0] if answer else "{}")
    if parsed.get("error", True) or len(parsed["statements"]) != 1:
        raise ValueError(f"not a SQL condition: {parsed.get('error_message', condition)}")
    names: dict[str, None] = {}

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("class") == "COLUMN_REF":
                names[node["column_names"][-1] if node["column_names"][0] == "rows" else node["column_names"][0]] = None
            for child in node.values():
                walk(child)
        elif isinstance(node, list):
            for child in node:
                walk(child)

    walk(parsed["statements"])
    return tuple(names)


class SqlConfig(ScoreOperatorConfig):
    """Either a condition on each row or a whole query."""

    weight: float = Field(0.0, description="share of the score in the reward, when the query gives one")
    keep_where: Annotated[str, AfterValidator(_condition)] | None = Field(
        None, description="DuckDB condition on one row; rows where it is false or null are rejected"
    )
    query: str | None = Field(
        None,
        description="DuckDB SELECT over the table `rows` that returns experience_id once for each row to keep, and "
        "optionally verdict (keep, reject, hold, mask), reason, detail, ref_id, score",
    )
    columns: tuple[str, ...] = Field((), description="columns of `rows` that the query uses; needed with query")
    score: bool = Field(False, description="whether the query returns a column score")
    reason: str = Field("not_selected", min_length=1, description="reason of rows that are not kept")

    @model_validator(mode="after")
    def _one_of_two(self) -> SqlConfig:
        if (self.keep_where is None) == (self.query is None):
            raise ValueError("give either keep_where or query")
        if self.query is None and (self.columns or self.score):
            raise ValueError("columns and score belong to query; keep_where finds its columns itself")
        if self.query is not None and not self.columns:
            raise ValueError("name in `columns` what the query uses (ids are always there: write [experience_id])")
        return self


class Sql(Operator[SqlConfig]):
    """Chooses rows with DuckDB SQL, which sees nothing but the frame: no files, no network, no other tables.

    `keep_where` is evaluated on each row alone; where it is false or null, the row is rejected with `reason`.

    `query` sees the whole frame as the table `rows` and must return `experience_id`, each at most once. A row it does
    not return is rejected with `reason`; a row it returns is kept, unless a column `verdict` says reject, hold or mask
    (null and keep: kept), for the `reason` the query gives or else the configured one. With `score: true` it returns a
    column `score`, the component of rows it returns; rows it does not return are not scored.
    """

    Config = SqlConfig

    def contract(self) -> Contract:
        """Reads the named columns; a query may reject, hold, mask and score."""
        if self.config.keep_where is not None:
            return Contract(reads=frozenset(_columns_of(self.config.keep_where)), drops=True)
        scores = (self.config.name,) if self.config.score else ()
        return Contract(
            reads=frozenset(self.config.columns), scores=scores, scope="frame", drops=True, holds=True, masks=True
        )

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Run the query on the frame."""
        if self.config.query is not None:
            return self._select(frame, self.config.query)
        answer = _run(frame, f"SELECT row_number__, ({self.config.keep_where}) AS keep FROM rows")
        keep = answer.sort("row_number__")["keep"]
        if not (keep.dtype == pl.Boolean or keep.dtype == pl.Null):
            raise TypeError(f"keep_where gives {keep.dtype}, not true or false")
        return Result(verdicts=self._rejected(frame, ~keep.cast(pl.Boolean).fill_null(False)))

    def _rejected(self, frame: pl.DataFrame, mask: pl.Series) -> pl.DataFrame:
        rows = mask.arg_true().cast(pl.UInt32)
        detail = _shortened(f"not ({self.config.keep_where})")
        return pl.DataFrame(
            {"row": rows, "verdict": ["reject"] * len(rows), "reason": [self.config.reason] * len(rows),
             "detail": [detail] * len(rows), "ref_id": [None] * len(rows)},
            schema=VERDICT_SCHEMA,
        )  # fmt: skip

    def _select(self, frame: pl.DataFrame, query: str) -> Result:
        answer = _run(frame, query)
        known = {"experience_id", "verdict", "reason", "detail", "ref_id", *(["score"] if self.config.score else [])}
        wrong = [name for name in answer.columns if name not in known]
        if wrong:
            raise ValueError(f"the query returns {wrong[0]!r}; it may return {', '.join(sorted(known))}")
        needed = ["experience_id", *(["score"] if self.config.score else [])]
        missing = [name for name in needed if name not in answer.columns]
        if missing:
            raise ValueError(f"the query does not return {missing[0]!r}")
        if answer["experience_id"].is_duplicated().any():
            raise ValueError("the query returns an experience_id more than once")
        strangers = answer.join(frame, on="experience_id", how="anti")
        if strangers.height:
            raise ValueError(f"the query returns experience_id {strangers['experience_id'][0]!r}, which is no row")
        return self._judged(frame, answer)

    def _judged(self, frame: pl.DataFrame, answer: pl.DataFrame) -> Result:
        absent = [pl.lit(None, dtype=pl.String).alias(n) for n in list(VERDICT_SCHEMA)[1:] if n not in answer.columns]
        found = frame.select("experience_id", row=pl.int_range(pl.len(), dtype=pl.UInt32)).join(
            answer.with_columns(*absent, returned=pl.lit(True)), on="experience_id", how="left", maintain_order="left"
        )
        returned = found["returned"].fill_null(False)
        verdict = pl.when(pl.col("returned").is_null()).then(pl.lit("reject")).otherwise(pl.col("verdict"))
        unnamed = pl.when(pl.col("returned").is_null()).then(pl.lit(_shortened(f"not in: {self.config.query}")))
        verdicts = (
            found.with_columns(
                verdict=verdict,
                reason=pl.col("reason").fill_null(self.config.reason),
                detail=pl.coalesce(pl.col("detail"), unnamed),
            )
            .filter(pl.col("verdict").is_not_null() & (pl.col("verdict") != "keep"))
            .select(pl.col(name).cast(dtype) for name, dtype in VERDICT_SCHEMA.items())
        )
        if not self.config.score:
            return Result(verdicts=verdicts)
        score = found.select((pl.col("score") + 0).cast(pl.Float64).alias(self.config.name)).to_series()
        return Result(verdicts=verdicts, scores={self.config.name: score}, scored=returned.alias("scored"))


def _shortened(text: str) -> str:
    """The condition or query on one line, as the detail of a rejection: of a length that a table of them can show."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_DETAIL else line[: _LONGEST_DETAIL - 1] + "…"


def _run(frame: pl.DataFrame, query: str) -> pl.DataFrame:
    with duckdb.connect(":memory:", config=_SETTINGS) as connection:
        connection.register("rows", frame.with_row_index("row_number__").to_arrow())
        statements = connection.extract_statements(query)
        if len(statements) != 1:
            raise ValueError(f"the SQL holds {len(statements)} statements; write one SELECT")
        answer = connection.sql(query)
        if answer is None:  # pyright: ignore[reportUnnecessaryComparison] - what DuckDB gives for other statements
            raise ValueError("the SQL is not a SELECT")
        return pl.DataFrame(pl.from_arrow(answer.to_arrow_table()))
