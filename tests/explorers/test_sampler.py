"""The task schedule: stateless, seeded, every task once per epoch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_engine.errors import TasksetError
from explorers.base import Message, Task
from explorers.sampler import plan_groups, select


def tasks(count: int) -> list[Task]:
    return [Task(f"t{n}", "s", "train", (Message("user", str(n)),)) for n in range(count)]


def test_sequential_order_counts_visits():
    found = select(tasks(3), start=2, count=5, order="sequential")
    assert [(task.task_id, visit) for task, visit in found] == [("t2", 0), ("t0", 1), ("t1", 1), ("t2", 1), ("t0", 2)]


@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, 9), steps=st.lists(st.integers(1, 12), min_size=1, max_size=6), seed=st.integers(0, 5))
def test_any_cut_into_steps_gives_the_same_schedule_with_every_task_once_per_epoch(size, steps, seed):
    pool = tasks(size)
    whole = select(pool, start=0, count=sum(steps), seed=seed)
    cut = []
    for count in steps:
        cut += select(pool, start=len(cut), count=count, seed=seed)
    assert cut == whole
    assert len({(task.task_id, visit) for task, visit in whole}) == len(whole)
    for epoch in range(sum(steps) // size):
        assert {task.task_id for task, visit in whole if visit == epoch} == {task.task_id for task in pool}


def test_epochs_and_seeds_have_orders_of_their_own():
    pool = tasks(20)
    first, second = select(pool, start=0, count=20, seed=1), select(pool, start=20, count=20, seed=1)
    other = select(pool, start=0, count=20, seed=2)
    orders = [[task.task_id for task, _ in chosen] for chosen in (first, second, other)]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


def test_groups_of_another_visit_or_run_have_ids_of_their_own():
    pool = tasks(1)
    ids = {
        plan.group_id
        for run in ("a", "b")
        for plan in plan_groups(select(pool, start=0, count=2), run_id=run, group_size=4)
    }
    assert len(ids) == 4


def test_no_tasks_is_an_error():
    with pytest.raises(TasksetError):
        select([], start=0, count=1)
