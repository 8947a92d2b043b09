"""messages_check: dialogues whose turns do not follow from each other."""

from __future__ import annotations

import json
from typing import Any, Literal, cast

import polars as pl
from pydantic import Field

from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.verdicts import verdicts_of

Role = Literal["system", "user", "assistant", "tool"]

_AFTER: dict[str, tuple[str, ...]] = {
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
"""Role → roles that may follow it."""


class MessagesCheckConfig(OperatorConfig):
    """Which dialogues are whole."""

    roles: tuple[Role, ...] = Field(
        ("system", "user", "assistant", "tool"), min_length=1, description="roles that may occur"
    )
    last: tuple[Role, ...] = Field(("assistant",), min_length=1, description="roles of the last message")
    alternate: bool = Field(
        True, description="user and assistant take turns, tools answer the assistant; false: any order"
    )
    allow_empty: bool = Field(False, description="whether messages of system, user and assistant may be blank")
    open_calls: bool = Field(False, description="whether the last assistant message may call tools that do not answer")


class MessagesCheck(Operator[MessagesCheckConfig]):
    """Rejects dialogues that break a rule of chat; the first message that breaks one gives reason and detail.

    Reasons: `no_messages`; `role` (not allowed here, or a system message that is not the first); `order` (the first
    after the system message is not the user, or roles do not follow each other); `empty` (blank text of system, user or
    assistant; an assistant that calls tools may be silent); `tool_calls` (not a JSON list of objects with an id each,
    or an id twice); `tool_result` (a tool message without the id of an open call); `unanswered` (a call without a
    result before the next turn, or at the end unless `open_calls`); `last` (the last message has another role).
    """

    Config = MessagesCheckConfig

    def contract(self) -> Contract:
        """Reads the messages; rejects."""
        return Contract(reads=frozenset(("messages",)), drops=True)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Look at every message of every row."""
        rows = frame.select(row=pl.int_range(pl.len()), message="messages")
        flat = (
            rows.filter(pl.col("message").list.len() > 0)
            .explode("message")
            .unnest("message")
            .with_columns(place=pl.int_range(pl.len()).over("row"), before=pl.col("role").shift(1).over("row"))
            .with_columns(reason=self._reason())
        )
        problems = flat.filter(pl.col("reason").is_not_null()).select("row", "place", "reason")
        first = pl.concat([problems, self._tools(flat)]).sort("row", "place", maintain_order=True)
        first = first.unique("row", keep="first", maintain_order=True)
        found = rows.join(first, on="row", how="left", maintain_order="left")
        nothing = pl.col("message").list.len() == 0
        return Result(
            verdicts=verdicts_of(
                found,
                "reject",
                pl.when(nothing).then(pl.lit("no_messages")).otherwise("reason"),
                detail=pl.format("message {}", pl.col("place")),
            )
        )

    def _reason(self) -> pl.Expr:
        """What is wrong with a message by its own and the previous role."""
        role, before = pl.col("role"), pl.col("before")
        is_last = pl.col("place") == pl.len().over("row") - 1
        starts = before.is_null() | ((before == "system") & (pl.col("place") == 1))
        follows = pl.any_horizontal((before == one) & role.is_in(list(after)) for one, after in _AFTER.items())
        misplaced = pl.when(starts).then(~role.is_in(["system", "user"])).otherwise(~follows.fill_null(False))
        silent = pl.col("content").fill_null("").str.strip_chars() == ""
        may_be_silent = (role == "tool") | ((role == "assistant") & pl.col("tool_calls").is_not_null())
        out = ~role.is_in(list(self.config.roles)) | ((role == "system") & (pl.col("place") > 0))
        return (
            pl.when(out)
            .then(pl.lit("role"))
            .when(misplaced if self.config.alternate else pl.lit(False))
            .then(pl.lit("order"))
            .when(pl.lit(not self.config.allow_empty) & silent & ~may_be_silent)
            .then(pl.lit("empty"))
            .when(is_last & ~role.is_in(list(self.config.last)))
            .then(pl.lit("last"))
        )

    def _tools(self, flat: pl.DataFrame) -> pl.DataFrame:
        """The first problem with calls and results in each row that has any."""
        concerned = flat.filter(((pl.col("role") == "tool") | pl.col("tool_calls").is_not_null()).any().over("row"))
        found: list[tuple[int, int, str]] = []
        # A Python loop over dialogues with tools only: what is open depends on all messages before.
        columns = ("row", "place", "role", "tool_calls", "tool_call_id")
        for (row,), messages in concerned.select(columns).group_by("row", maintain_order=True):
            problem = self._tool_problem(messages.drop("row").rows())
            if problem is not None:
                found.append((cast("int", row), *problem))
        schema = {"row": flat.schema["row"], "place": flat.schema["place"], "reason": pl.String()}
        return pl.DataFrame(found, schema=schema, orient="row")

    def _tool_problem(self, messages: list[tuple[Any, ...]]) -> tuple[int, str] | None:
        open_calls: set[str] = set()
        seen: set[str] = set()
        place = 0
        for place, role, calls, call_id in messages:
            if role == "tool":
                if call_id not in open_calls:
                    return place, "tool_result"
                open_calls.discard(call_id)
                continue
            if open_calls:
                return place, "unanswered"
            if calls is not None:
                ids = _call_ids(calls)
                if role != "assistant" or ids is None or len(set(ids)) < len(ids) or seen & set(ids):
                    return place, "tool_calls"
                open_calls, seen = set(ids), seen | set(ids)
        return (place, "unanswered") if open_calls and not self.config.open_calls else None


def _call_ids(text: str) -> list[str] | None:
    """Ids of the calls in a message; None: not a list of objects with an id each."""
    try:
        calls: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(calls, list):
        return None
    ids = [call.get("id") if isinstance(call, dict) else None for call in calls]
    return [one for one in ids if isinstance(one, str) and one] if all(isinstance(i, str) and i for i in ids) else None
