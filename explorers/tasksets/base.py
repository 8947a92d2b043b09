"""What all task sets share: partition, system message, limit, and a split that never puts a prompt on both sides."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from buffer_engine.config import ComponentConfig
from buffer_engine.errors import TasksetError
from buffer_engine.identity import stable_digest, stable_seed
from buffer_engine.store.base import Partition
from explorers.base import Message, Task


class Split(ComponentConfig):
    """One side of a division of the source's distinct prompts by a hash; both sides together are the whole source."""

    share: float = Field(gt=0, lt=1, description="expected share of prompts that are held out")
    seed: int = Field(1, description="another seed holds out other prompts; use the same on both sides")
    part: Literal["held_out", "rest"] = Field(description="which side this task set takes")

    def takes(self, source: object) -> bool:
        """Whether the prompt with this source content is on this side."""
        held_out = stable_seed("split", self.seed, source) < self.share * 2**63
        return held_out == (self.part == "held_out")


class TasksetConfig(ComponentConfig):
    """Base of a task set's configuration; each type adds its own fields."""

    # Each type narrows this to its own literal.
    type: Any = Field(description="name of the task set in the registry")
    partition: Partition = Field("train", description="train or eval; the two never mix")
    system: str | None = Field(None, description="system message put before every task that has none")
    limit: int | None = Field(None, gt=0, description="take only the first tasks (after the split)")
    split: Split | None = Field(None, description="take one side of a division by prompt")


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of a source, before it becomes a task.

    Attributes:
        source: the prompt as the source has it, before template and system message; the split looks at this, so that
            two task sets with different templates over one source still share no prompt.
    """

    source: object
    messages: tuple[Message, ...]
    info: Mapping[str, Any] = field(default_factory=dict)


def build_tasks(name: str, config: TasksetConfig, items: Iterable[Item], *, where: str) -> list[Task]:
    """Tasks with the shared options applied, in the source's order.

    An entry that occurs twice gives two tasks, whose ids tell them apart by how often it came before.

    Raises:
        TasksetError: nothing is left; `where` names the source.
    """
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for item in items:
        if config.split is not None and not config.split.takes(item.source):
            continue
        if config.limit is not None and len(tasks) >= config.limit:
            break
        messages = item.messages
        if config.system is not None and messages[0].role != "system":
            messages = (Message("system", config.system), *messages)
        digest = stable_digest([message.as_dict() for message in messages], item.info)
        occurrence = seen[digest] = seen.get(digest, -1) + 1
        task_id = f"{name}-{digest}" + (f"-{occurrence}" if occurrence else "")
        tasks.append(Task(task_id, name, config.partition, messages, item.info))
    if not tasks:
        side = f" on the side {config.split.part!r} of the split" if config.split is not None else ""
        raise TasksetError(f"task set {name!r}: {where} has no tasks{side} → check the path, the split and its share")
    return tasks


def json_safe(value: object, *, where: str) -> Any:
    """`value` as it will read back from JSON: tuples and sets become lists.

    Raises:
        TasksetError: it has no JSON form.
    """
    try:
        return json.loads(json.dumps(value, default=_plain, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TasksetError(f"{where}: a value has no JSON form ({error})") from error


def _plain(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)  # pyright: ignore[reportUnknownArgumentType]
    for method in ("isoformat", "tolist"):  # dates and times; numpy numbers and arrays
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"{type(value).__name__} {str(value)[:60]!r}")
