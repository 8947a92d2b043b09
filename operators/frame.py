"""The frame that operators see: one row per rollout, and only the columns that somebody asked for.

Token arrays and dialogues are heavy, so a column is built only when an operator of the plan reads it. Names are looked
up in this order: the columns below, the task's info keys, score components.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from buffer_engine.errors import SchemaError
from operators.reward_state import current_reward, current_scores, read_scores

__all__ = ["FRAME_COLUMNS", "FrameColumn", "build_frame", "current_reward", "info_dtype"]

MESSAGES = pl.List(
    pl.Struct(
        {
            "role": pl.String(),
            "content": pl.String(),
            "tool_calls": pl.String(),
            "tool_call_id": pl.String(),
            "media": pl.List(pl.String()),
        }
    )
)
"""Type of the column `messages`, the Polars form of `schema.MESSAGE`."""


@dataclass(frozen=True, slots=True)
class FrameColumn:
    """One column: its type and what it holds.

    Attributes:
        sources: columns of `rollouts` that it is made from.
        build: expression over those columns; None: the single source as it is.
    """

    dtype: pl.DataType
    doc: str
    sources: tuple[str, ...] = ()
    build: pl.Expr | None = None


def _last_text(role: str) -> pl.Expr:
    of_role = pl.element().filter(pl.element().struct.field("role") == role).struct.field("content")
    return pl.col("messages").list.eval(of_role).list.last().fill_null("")


def _plain(name: str, dtype: pl.DataType, doc: str) -> tuple[str, FrameColumn]:
    return name, FrameColumn(dtype, doc, (name,))


FRAME_COLUMNS: Mapping[str, FrameColumn] = dict(
    (
        _plain("experience_id", pl.String(), "id of the rollout; always there"),
        _plain("task_id", pl.String(), "task it attempts; always there"),
        _plain("group_id", pl.String(), "siblings that play one task together; always there"),
        _plain("group_size", pl.Int32(), "how many samples the group has when complete"),
        _plain("sample_index", pl.Int32(), "0-based position in the group"),
        _plain("attempt", pl.Int32(), "0-based retry number"),
        _plain("turn_index", pl.Int32(), "0-based segment of the episode; above 0 where an episode has several rows"),
        _plain("partition", pl.String(), "train | eval"),
        _plain("model_version", pl.Int64(), "oldest weight version that sampled a token; null: no model"),
        _plain("made_by", pl.String(), "explorer | import | id of the operator that made the row"),
        _plain("stop_reason", pl.String(), "why sampling stopped"),
        _plain("eos_sampled", pl.Boolean(), "whether the model itself ended the last reply"),
        _plain("truncated", pl.Boolean(), "whether a limit cut the sequence"),
        _plain("error", pl.String(), "kind: message of a failed rollout; null for every row an operator sees"),
        _plain("messages", MESSAGES, "the whole dialogue, a list of structs"),
        (
            "prompt",
            FrameColumn(
                pl.String(),
                "text of the last user message; empty when there is none",
                ("messages",),
                _last_text("user"),
            ),
        ),
        (
            "response",
            FrameColumn(
                pl.String(),
                "text of the last assistant message; empty when there is none",
                ("messages",),
                _last_text("assistant"),
            ),
        ),
        (
            "turns",
            FrameColumn(
                pl.Int64(),
                "number of assistant messages",
                ("messages",),
                pl.col("messages").list.eval(pl.element().struct.field("role") == "assistant").list.sum(),
            ),
        ),
        (
            "token_count",
            FrameColumn(
                pl.Int64(),
                "sampled tokens: those the loss mask marks true",
                ("loss_mask",),
                pl.col("loss_mask").list.sum(),
            ),
        ),
        (
            "total_tokens",
            FrameColumn(
                pl.Int64(), "prompt and sampled tokens; 0 for text rows", ("token_ids",), pl.col("token_ids").list.len()
            ),
        ),
        _plain("prompt_length", pl.Int32(), "tokens before the first sampled one"),
        _plain("token_ids", pl.List(pl.Int32()), "prompt and sampled ids"),
        _plain("loss_mask", pl.List(pl.Boolean()), "true where the policy sampled the token and it may train"),
        _plain("logprobs", pl.List(pl.Float32()), "behaviour log-probability in nats; null where nothing was sampled"),
        (
            "mean_logprob",
            FrameColumn(
                pl.Float64(),
                "mean log-probability of the sampled tokens in nats; null when there is none",
                ("logprobs",),
                pl.col("logprobs").cast(pl.List(pl.Float64)).list.mean(),
            ),
        ),
        _plain("info_json", pl.String(), "JSON object of the row: what workflow or import added"),
        ("task_info", FrameColumn(pl.String(), "JSON object of the task: the whole of its info")),
        ("reward", FrameColumn(pl.Float64(), "sum of weight times value of the current scores; null: no reward")),
        ("alive", FrameColumn(pl.Boolean(), "false for rows that an earlier operator took out; see `over: all`")),
    )
)
"""Every column that a frame can have besides task info keys and score components."""

ALWAYS = ("experience_id", "task_id", "group_id")
"""Columns that are in every frame, asked for or not."""


def info_dtype(dtype: pl.DataType) -> pl.DataType:
    """The column type of an info key declared as `dtype`: `Object` arrives as its JSON text."""
    return pl.String() if dtype == pl.Object else dtype


def build_frame(
    rollouts: pa.Table,
    tasks: pa.Table,
    scores: pa.Table,
    *,
    columns: Collection[str],
    info_columns: Mapping[str, pl.DataType],
) -> pl.DataFrame:
    """Join rollouts with their tasks and current scores; only the columns asked for are made.

    Args:
        rollouts: rows of `schema.ROLLOUTS`; needs the sources of the columns asked for (`rollout_columns`).
        tasks: rows of `schema.TASKS`, those of the rollouts at least, when a task column is asked for.
        scores: rows of `schema.SCORES` of these rollouts, any versions; rows of others are ignored.
        columns: names from `FRAME_COLUMNS` or `info_columns`; any other name is a score component.
        info_columns: task info keys and their types; a key that a task lacks is null.
    Returns:
        One row per rollout in the order of `rollouts`. Components are Float64: the current value, null where the row
        has no such score or where it could not be scored.
    Raises:
        SchemaError: a rollout's task is missing, or an info value is not of its declared type.
    """
    wanted = list(dict.fromkeys((*ALWAYS, *columns)))
    frame = _rollout_columns(rollouts, wanted)
    info_keys = {name: info_columns[name] for name in wanted if name in info_columns and name not in FRAME_COLUMNS}
    if info_keys or "task_info" in wanted:
        facts = _task_columns(tasks, info_keys)
        missing = frame.join(facts, on="task_id", how="anti")
        if missing.height:
            first = missing.row(0, named=True)
            raise SchemaError(
                f"rollout {first['experience_id']!r} attempts task {first['task_id']!r}, which is not among the "
                f"{tasks.num_rows} tasks given: pass the tasks of all rollouts"
            )
        frame = frame.join(facts, on="task_id", how="left", maintain_order="left")
    components = [name for name in wanted if name not in FRAME_COLUMNS and name not in info_columns]
    if components or "reward" in wanted:
        frame = _score_columns(frame, scores, components, reward="reward" in wanted)
    if "alive" in wanted:
        frame = frame.with_columns(alive=pl.lit(True))
    return frame.select(wanted)


def rollout_columns(columns: Collection[str]) -> list[str]:
    """Columns of `rollouts` that a frame with `columns` needs; what to ask the store for."""
    sources = [
        source for name in (*ALWAYS, *columns) if name in FRAME_COLUMNS for source in FRAME_COLUMNS[name].sources
    ]
    return list(dict.fromkeys((*sources, "error") if "reward" in columns else sources))


def _rollout_columns(rollouts: pa.Table, wanted: Collection[str]) -> pl.DataFrame:
    source = pl.DataFrame(pl.from_arrow(rollouts.select(rollout_columns(wanted))))
    made: list[pl.Expr] = []
    for name in wanted:
        column = FRAME_COLUMNS.get(name)
        if column is not None and column.sources:
            made.append((column.build if column.build is not None else pl.col(name)).cast(column.dtype).alias(name))
    if "reward" in wanted and "error" not in wanted:
        made.append(pl.col("error").cast(pl.String))
    return source.select(made)


def _task_columns(tasks: pa.Table, keys: Mapping[str, pl.DataType]) -> pl.DataFrame:
    # A Python loop: tasks are far fewer than rollouts, and info objects have no common shape to decode into.
    task_ids: list[Any] = tasks.column("task_id").to_pylist()
    texts: list[Any] = tasks.column("info_json").to_pylist()
    values: dict[str, list[Any]] = {name: [] for name in keys}
    for task_id, text in zip(task_ids, texts, strict=True):
        info = json.loads(text)
        for name, dtype in keys.items():
            values[name].append(_info_value(info.get(name), dtype, task_id=task_id, key=name))
    return pl.DataFrame(
        {"task_id": task_ids, "task_info": texts, **values},
        schema={"task_id": pl.String(), "task_info": pl.String(), **{name: info_dtype(t) for name, t in keys.items()}},
    ).unique("task_id", keep="first", maintain_order=True)


def _info_value(value: Any, dtype: pl.DataType, *, task_id: str, key: str) -> Any:
    if value is None:
        return None
    if dtype == pl.Object:
        return json.dumps(value, ensure_ascii=False)
    if dtype == pl.String:
        fits = isinstance(value, str)
    elif dtype == pl.Boolean:
        fits = isinstance(value, bool)
    elif dtype.is_integer():
        fits = isinstance(value, int) and not isinstance(value, bool)
    elif dtype.is_float():
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        fits = True
    if not fits:
        raise SchemaError(
            f"task {task_id!r}: info key {key!r} is {value!r} ({type(value).__name__}), "
            f"but the task set declares {dtype}"
        )
    return float(value) if dtype.is_float() else value


def _score_columns(frame: pl.DataFrame, scores: pa.Table, components: list[str], *, reward: bool) -> pl.DataFrame:
    known = read_scores(scores).join(frame.select("experience_id"), on="experience_id", how="semi")
    current = current_scores(known)
    for name in components:
        values = current.filter(pl.col("name") == name).select("experience_id", pl.col("value").alias(name))
        frame = frame.join(values, on="experience_id", how="left", maintain_order="left")
    if reward:
        rewards = current_reward(current).select("experience_id", "reward")
        frame = frame.join(rewards, on="experience_id", how="left", maintain_order="left").with_columns(
            pl.when(pl.col("error").is_null()).then(pl.col("reward")).alias("reward")
        )
    return frame
