"""Nine short question sets with exact answers from the evals package (MIT).

The package carries several hundred sets. Listed here are some whose files hold text, which its licence file does not
except, and which are short questions of arithmetic, text handling or plain facts, not excerpts of another corpus. Their
answers were recomputed. Sets in which wrong answers turned up are left out, and so is compare-countries-area, whose
answer is the first of the named countries every time: a model would learn that instead.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field

from buffer_engine.errors import TasksetError
from explorers.base import Task
from explorers.package_data import fetch_archive
from explorers.tasksets.base import Item, TasksetConfig, build_tasks
from explorers.tasksets.messages import read_messages

DISTRIBUTION, VERSION = "evals", "3.0.1.post1"
FOLDER = "evals/registry/data"

Dataset = Literal[
    "born_first",
    "count_token_freq_dna",
    "first-letters",
    "math_equations",
    "matrix_mult_rows",
    "positive-binary-operations",
    "solve-for-variable",
    "sort_numeric",
    "swap-words",
]
# The others' file is samples.jsonl.
_FILES: Mapping[str, str] = {"born_first": "born_first.jsonl", "math_equations": "math_equations.jsonl"}


class EvalsConfig(TasksetConfig):
    """Info: answer (the first accepted one), answers (JSON text: list of all accepted ones), dataset."""

    type: Literal["evals"] = "evals"
    dataset: Dataset = Field(description="which of the package's question sets")


class EvalsTaskset:
    """Tasks from the archive of evals, read as data; the package is neither installed nor imported.

    Every entry brings its own system message, so the option `system` changes nothing. Answers are as the entry asks for
    them, such as `[16.0476]` in math_equations and `{1}` in solve-for-variable.
    """

    Config: ClassVar[type[EvalsConfig]] = EvalsConfig

    def __init__(self, config: EvalsConfig) -> None:
        self.config = config

    def columns(self) -> Mapping[str, str]:
        """Info columns."""
        return dict.fromkeys(("answer", "answers", "dataset"), "String")

    def load(self, name: str) -> list[Task]:
        """All tasks of the set; see `TaskSet.load`. The archive (46 MB) is fetched on first use.

        Raises:
            TasksetError: the archive cannot be fetched or read, or nothing is left of the set.
        """
        return build_tasks(name, self.config, self._items(), where=f"{DISTRIBUTION} {VERSION}, {self.config.dataset}")

    def _items(self) -> Iterator[Item]:
        dataset = self.config.dataset
        member = f"{FOLDER}/{dataset}/{_FILES.get(dataset, 'samples.jsonl')}"
        # Not splitlines(): JSON text may hold U+2028, at which that would split.
        for line in _text(member).split("\n"):
            if not line.strip():
                continue
            entry = json.loads(line)
            messages = read_messages(entry["input"])
            ideal: str | list[str] = entry["ideal"]
            answers = [ideal] if isinstance(ideal, str) else ideal
            info = {"answer": answers[0], "answers": json.dumps(answers, ensure_ascii=False), "dataset": dataset}
            yield Item([[message.role, message.content] for message in messages], messages, info)


def _text(member: str) -> str:
    try:
        with zipfile.ZipFile(fetch_archive(DISTRIBUTION, VERSION)) as archive:
            return archive.read(member).decode("utf-8")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise TasksetError(f"task set evals: {error} → it needs the package index once; check the network") from error
