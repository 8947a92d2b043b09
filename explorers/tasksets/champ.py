"""CHAMP: 270 competition mathematics problems with answers, solution steps and hints (package champ-dataset, MIT)."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from buffer_engine.errors import TasksetError
from explorers.base import Message, Task
from explorers.package_data import fetch_archive
from explorers.placeholders import fill, placeholders
from explorers.tasksets.base import Item, TasksetConfig, build_tasks

DISTRIBUTION, VERSION = "champ-dataset", "1.0.0"
MEMBER = "champ_dataset/dataset_files/v0.json"


class ChampConfig(TasksetConfig):
    """Info: problem (identifier), category, answer, steps (list), hints (list)."""

    type: Literal["champ"] = "champ"
    categories: tuple[str, ...] | None = Field(
        None, description="Combinatorics, Inequality, Number-Theory, Polynomial, Sequence; default: all"
    )
    template: str = Field("{question}", description="text of the user turn around {question}")

    @model_validator(mode="after")
    def _asks_the_question(self) -> Self:
        if set(placeholders(self.template)) != {"question"}:
            raise ValueError("template must contain {question} and no other name")
        return self


class ChampTaskset:
    """Tasks from the archive of champ-dataset, read as data; the package is neither installed nor imported."""

    Config: ClassVar[type[ChampConfig]] = ChampConfig

    def __init__(self, config: ChampConfig) -> None:
        self.config = config

    def columns(self) -> Mapping[str, str]:
        """Info columns."""
        return {"problem": "String", "category": "String", "answer": "String", "steps": "Object", "hints": "Object"}

    def load(self, name: str) -> list[Task]:
        """All tasks; see `TaskSet.load`. The archive (8 MB) is fetched on first use."""
        return build_tasks(name, self.config, self._items(), where=f"{DISTRIBUTION} {VERSION}")

    def _items(self) -> Iterator[Item]:
        content = _content()
        categories = {problem["category"] for problem in content["problems"].values()}
        unknown = sorted(set(self.config.categories or ()) - categories)
        if unknown:
            raise TasksetError(f"champ has no category {unknown[0]!r} → known: {', '.join(sorted(categories))}")
        for identifier, problem in content["problems"].items():
            if self.config.categories is not None and problem["category"] not in self.config.categories:
                continue
            question = str(problem["_text"])
            related = [content["hints"].get(key) for key in problem["ch_list"]]
            info = {
                "problem": identifier,
                "category": problem["category"],
                "answer": problem["_answer"],
                "steps": [_plain_text(step) for step in problem["solution"]["steps"]],
                "hints": [hint["_text"] for hint in related if hint is not None],
            }
            yield Item(question, (Message("user", fill(self.config.template, {"question": question})),), info)


def _plain_text(step: object) -> str:
    return str(step["_text"]) if isinstance(step, Mapping) else str(step)


def _content() -> dict[str, Any]:
    try:
        with zipfile.ZipFile(fetch_archive(DISTRIBUTION, VERSION)) as archive:
            return json.loads(archive.read(MEMBER))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise TasksetError(f"task set champ: {error} → it needs the package index once; check the network") from error
