"""A conversation whose user turns are known beforehand: from the task, or one follow-up said again and again."""

from __future__ import annotations

import re
from typing import ClassVar, Literal, Self, cast

from pydantic import Field, field_validator, model_validator

from buffer_engine.errors import RolloutError
from explorers.base import ChatModel, Message, Outcome, Task
from explorers.placeholders import fill, placeholders
from explorers.workflows.base import WorkflowConfig


class MultiTurnConfig(WorkflowConfig):
    """Up to `max_turns` replies, with a user turn between any two."""

    type: Literal["multi_turn"] = "multi_turn"
    max_turns: int = Field(4, gt=0, description="most replies of the model")
    user_turns: str | None = Field("user_turns", description="task info key with the list of later user turns")
    feedback: str | None = Field(
        None, description="user turn when the task has none (left); {reply}, {turn} and info keys are filled in"
    )
    until: str | None = Field(None, description="regular expression; a reply that contains it ends the conversation")

    @field_validator("until")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}") from error
        return value

    @model_validator(mode="after")
    def _has_user_turns(self) -> Self:
        if self.user_turns is None and self.feedback is None and self.max_turns > 1:
            raise ValueError("give user_turns (a task info key) or feedback, or there is nothing to say after turn 1")
        return self


class MultiTurn:
    """A `Workflow` that plays a conversation.

    It ends when a reply matches `until`, when a reply was cut by a limit, when there is nothing left to say, or after
    `max_turns` replies. Only the last case with user turns left (or `until` unmet) is reported as `max_turns`.
    """

    Config: ClassVar[type[MultiTurnConfig]] = MultiTurnConfig

    def __init__(self, config: MultiTurnConfig) -> None:
        self.config = config
        self._until = re.compile(config.until) if config.until is not None else None

    async def run(self, task: Task, chat: ChatModel) -> Outcome:
        """Play the task; info says how many turns were played and whether `until` was met."""
        planned = self._planned(task)
        messages = list(task.messages)
        for turn in range(1, self.config.max_turns + 1):
            reply = await chat.chat(messages)
            messages.append(reply.message)
            met = self._until is not None and self._until.search(reply.message.content) is not None
            said = self._next_user_turn(task, planned, turn, reply.message.content)
            if met or said is None or reply.stop_reason == "length":
                return Outcome(info=self._info(turn, met))
            messages.append(Message("user", said))
        return Outcome(info=self._info(self.config.max_turns, met=False), stop_reason="max_turns")

    def _info(self, turns: int, met: bool) -> dict[str, object]:
        played: dict[str, object] = {"turns": turns}
        return played if self._until is None else played | {"until_met": met}

    def _planned(self, task: Task) -> list[str]:
        key = self.config.user_turns
        planned: object = task.info.get(key) if key is not None else None
        if planned is None:
            return []
        if not isinstance(planned, list) or not all(isinstance(turn, str) for turn in cast("list[object]", planned)):
            raise RolloutError("workflow", f"task info {key!r} should be a list of strings and is {planned!r}")
        return cast("list[str]", planned)

    def _next_user_turn(self, task: Task, planned: list[str], turn: int, reply: str) -> str | None:
        if turn <= len(planned):
            return planned[turn - 1]
        template = self.config.feedback
        if template is None:
            return None
        values = {**task.info, "reply": reply, "turn": turn}
        missing = sorted(placeholders(template) - set(values))
        if missing:
            raise RolloutError("workflow", f"feedback asks for {missing[0]!r}; task info has {sorted(task.info)}")
        return fill(template, values)
