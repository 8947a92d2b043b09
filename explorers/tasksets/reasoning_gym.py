"""Generated reasoning tasks with verifiers, from the reasoning-gym package."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from buffer_engine.errors import TasksetError, did_you_mean
from buffer_engine.extras import require
from explorers.base import Message, Task
from explorers.placeholders import fill, placeholders
from explorers.tasksets.base import Item, TasksetConfig, build_tasks, json_safe

HASH_SEEDED = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Datasets whose entries depend on Python's hash seed as well as on their own."""
UNREPEATABLE = frozenset({"codeio"})
"""Datasets that give other entries every time."""


class ReasoningGymConfig(TasksetConfig):
    """One reasoning-gym dataset. Info: dataset, question, answer, metadata (what its verifier needs)."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = Field(min_length=1, description="name in reasoning-gym, e.g. chain_sum")
    size: int = Field(500, gt=0, description="entries generated, before equal prompts are dropped")
    seed: int = Field(1, description="seed of the dataset")
    config: Mapping[str, Any] = Field(default_factory=dict, description="the dataset's own parameters")
    template: str = Field("{question}", description="text of the user turn around {question}")

    @model_validator(mode="after")
    def _asks_the_question(self) -> Self:
        if set(placeholders(self.template)) != {"question"}:
            raise ValueError("template must contain {question} and no other name")
        return self


class ReasoningGymTaskset:
    """Tasks from reasoning-gym. Entries with equal questions give one task."""

    Config: ClassVar[type[ReasoningGymConfig]] = ReasoningGymConfig

    def __init__(self, config: ReasoningGymConfig) -> None:
        self.config = config

    def columns(self) -> Mapping[str, str]:
        """Info columns, known without importing the package."""
        return {"dataset": "String", "question": "String", "answer": "String", "metadata": "Object"}

    def load(self, name: str) -> list[Task]:
        """All tasks; see `TaskSet.load`.

        Raises:
            TasksetError: no such dataset, unusable parameters, or entries that would differ from run to run.
            MissingExtraError: reasoning-gym is not installed.
        """
        dataset = self.config.dataset
        if dataset in UNREPEATABLE:
            raise TasksetError(
                f"reasoning_gym dataset {dataset!r} gives other tasks every time; a run cannot resume it"
            )
        if dataset in HASH_SEEDED and os.environ.get("PYTHONHASHSEED", "random") == "random":
            raise TasksetError(
                f"reasoning_gym dataset {dataset!r} depends on Python's hash seed → set PYTHONHASHSEED=0 for the run"
            )
        return build_tasks(name, self.config, self._items(), where=f"reasoning_gym dataset {dataset!r}")

    def _items(self) -> Iterator[Item]:
        seen: set[str] = set()
        dataset = self.config.dataset
        for number, entry in enumerate(self._entries()):
            question = str(entry["question"])
            if question in seen:
                continue
            seen.add(question)
            where = f"reasoning_gym dataset {dataset!r} entry {number}"
            info = {"dataset": dataset} | json_safe(dict(entry), where=where)
            yield Item(question, (Message("user", fill(self.config.template, {"question": question})),), info)

    def _entries(self) -> Iterator[Mapping[str, Any]]:
        require("reasoning_gym", "demo")
        factory = require("reasoning_gym.factory", "demo")
        config = self.config
        if config.dataset not in factory.DATASETS:
            hint = did_you_mean(config.dataset, factory.DATASETS)
            raise TasksetError(f"reasoning_gym has no dataset {config.dataset!r} → {hint}")
        try:
            source = factory.create_dataset(config.dataset, size=config.size, seed=config.seed, **config.config)
            yield from (source[index] for index in range(config.size))
        except (AssertionError, TypeError, ValueError) as error:
            raise TasksetError(
                f"reasoning_gym dataset {config.dataset!r} refuses config {dict(config.config)}: {error}"
            ) from error
