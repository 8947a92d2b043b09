"""Ask once, take the reply."""

from __future__ import annotations

from typing import ClassVar, Literal

from explorers.base import ChatModel, Outcome, Task
from explorers.workflows.base import WorkflowConfig


class SingleTurnConfig(WorkflowConfig):
    """One prompt, one reply; rewards come from operators."""

    type: Literal["single_turn"] = "single_turn"


class SingleTurn:
    """A `Workflow` that sends the task's messages and records the reply."""

    Config: ClassVar[type[SingleTurnConfig]] = SingleTurnConfig

    def __init__(self, config: SingleTurnConfig) -> None:
        self.config = config

    async def run(self, task: Task, chat: ChatModel) -> Outcome:
        """Play the task."""
        await chat.chat(task.messages)
        return Outcome()
