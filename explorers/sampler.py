"""Which tasks are played when: a pure function of the seed and of how many were scheduled before.

There is no state to save or to restore: a resumed run asks the same question and gets the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from buffer_engine.errors import TasksetError
from buffer_engine.identity import group_id, stable_digest
from explorers.base import GroupPlan, Task

TaskOrder = Literal["sequential", "shuffle"]


def select(
    tasks: Sequence[Task], *, start: int, count: int, order: TaskOrder = "shuffle", seed: int = 0
) -> list[tuple[Task, int]]:
    """`count` tasks from position `start` of the endless schedule, each with how often it was scheduled before.

    Every task comes once per epoch; with `shuffle` each epoch has its own permutation.

    Args:
        start: tasks scheduled before; step k (from 0) of a loop with n tasks per step starts at k * n.

    Raises:
        TasksetError: there are no tasks.
    """
    if not tasks:
        raise TasksetError("there are no tasks to select from")
    chosen: list[tuple[Task, int]] = []
    while len(chosen) < count:
        epoch, offset = divmod(start + len(chosen), len(tasks))
        ordered = list(tasks) if order == "sequential" else _permuted(tasks, epoch, seed)
        chosen += [(task, epoch) for task in ordered[offset : offset + count - len(chosen)]]
    return chosen


def plan_groups(selected: Sequence[tuple[Task, int]], *, run_id: str, group_size: int) -> list[GroupPlan]:
    """A group per selected task, with ids that depend on the run, the task and the visit."""
    return [GroupPlan(task, group_id(run_id, task.task_id, visit), group_size) for task, visit in selected]


def _permuted(tasks: Sequence[Task], epoch: int, seed: int) -> list[Task]:
    return sorted(tasks, key=lambda task: stable_digest(seed, epoch, task.task_id))
