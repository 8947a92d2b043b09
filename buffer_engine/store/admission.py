"""What new rows must agree on with rows that are stored: partitions and references."""

from __future__ import annotations

from collections.abc import Sequence

from buffer_engine.errors import PartitionError, SchemaError
from buffer_engine.store import index
from buffer_engine.store.connection import Connection
from buffer_engine.store.media import check_media
from buffer_engine.store.staging import Staged

ABOUT_ROLLOUTS = ("scores", "decisions", "batch_rows", "token_stats", "erasures")
"""Tables whose rows are about a rollout."""


def check_partitions(connection: Connection, staged: Sequence[Staged]) -> None:
    """A prompt is in one partition only, and a rollout in that of its task.

    Raises:
        PartitionError: names both sides.
    """
    prompts: dict[str, tuple[str, str]] = {}
    partition_of_task: dict[str, str] = {}
    for part in staged:
        if part.spec.name != "tasks":
            continue
        columns = [part.batch.column(name).to_pylist() for name in ("task_id", "partition", "prompt_hash")]
        for task_id, partition, prompt in zip(*columns, strict=True):
            partition_of_task[task_id] = partition
            other_id, other = prompts.setdefault(prompt, (task_id, partition))
            if other != partition:
                raise _overlap(task_id, partition, other_id, other)
    if prompts:
        listed = index.tasks_with_prompts(connection, list(prompts))
        for other_id, other, prompt in listed:
            task_id, partition = prompts[prompt]
            if other != partition:
                raise _overlap(task_id, partition, other_id, other)
    for part in staged:
        if part.spec.name != "rollouts":
            continue
        columns = [part.batch.column(name).to_pylist() for name in ("experience_id", "task_id", "partition")]
        known = index.partitions_of_tasks(connection, columns[1]) | partition_of_task
        if not known:
            continue
        for experience_id, task_id, partition in zip(*columns, strict=True):
            if known.get(task_id, partition) != partition:
                raise PartitionError(
                    f"rollouts: experience_id={experience_id!r} is in partition {partition!r}, but its task "
                    f"{task_id!r} is in {known[task_id]!r}; give the rollout the partition of its task"
                )


def _overlap(task_id: str, partition: str, other_id: str, other: str) -> PartitionError:
    return PartitionError(
        f"tasks: the prompt of task_id={task_id!r} ({partition}) is also that of {other_id!r} ({other}); training and "
        "evaluation prompts may not overlap: remove it from one of the two"
    )


def check_references(connection: Connection, staged: Sequence[Staged]) -> None:
    """What is about a rollout is about a stored or arriving one, and the attachments of messages are there.

    Raises:
        SchemaError: names one that is neither.
    """
    check_media(connection, staged)
    arriving = {key[0] for part in staged if part.spec.name == "rollouts" for key in part.keys}
    for part in staged:
        if part.spec.name in ABOUT_ROLLOUTS:
            about: list[str] = part.batch.column("experience_id").to_pylist()
            if arriving:
                about = [one for one in about if one not in arriving]
            unknown = index.unknown_rollouts(connection, about)
            if unknown:
                raise SchemaError(
                    f"{part.spec.name}: experience_id={min(unknown)!r} is not a stored rollout "
                    f"({len(unknown)} such id(s)); append the rollout first, or in the same call"
                )
