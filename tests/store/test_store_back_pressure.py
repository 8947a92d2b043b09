"""A bound on the rollouts that wait: appends stand still, nothing is dropped, and whoever consumes lets them on."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from backends import only_local, open_store
from store_rows import child_environment, decisions, manifest, rollouts, score, table

from buffer_engine.errors import StoreError, StoreFullError
from buffer_engine.store import BackPressure, LocalStore
from buffer_engine.store.base import ReadPolicy

pytestmark = pytest.mark.usefixtures("backend")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[LocalStore]:
    with open_store(path, durability="process", back_pressure=BackPressure(rows=4, seconds=0.1)) as opened:
        yield opened


def train(store: LocalStore, step: int) -> None:
    """Reserve, prepare and commit two rows."""
    held = store.reserve(ReadPolicy.model_validate({"rows": 2}), run_id="run", batch_id=f"b{step}", model_version=0)
    assert held is not None
    batch, rows = manifest(held.batch_id, step, held.experience_ids)
    store.prepare_batch(held, step=step, batch=batch, rows=rows)
    store.commit_batch(held.batch_id, step=step)


def test_an_append_over_the_bound_is_refused_with_the_counts(store: LocalStore) -> None:
    store.append("rollouts", rollouts(range(6)))  # begins with nothing waiting, so it is stored whole
    store.append("decisions", decisions([0, 1]))
    store.append("decisions", decisions([2], "hold"))
    assert (
        store.reserve(ReadPolicy.model_validate({"rows": 2}), run_id="run", batch_id="b1", model_version=0) is not None
    )
    said = "6 rollouts of run 'run' wait to be trained (3 new, 1 held, 0 kept, 2 reserved), the bound is 4"
    with pytest.raises(StoreFullError, match=re.escape(said)):
        store.append("rollouts", rollouts([6, 7]))
    assert store.table("rollouts").num_rows == 6


def test_rejected_and_trained_rows_wait_for_nothing(store: LocalStore) -> None:
    store.append("rollouts", rollouts(range(4)))
    store.append("decisions", decisions([0, 1], "reject"))
    store.append("rollouts", rollouts([4, 5]))
    store.append("decisions", decisions([2, 3, 4, 5]))
    with pytest.raises(StoreFullError):
        store.append("rollouts", rollouts([6, 7]))
    train(store, 1)
    store.append("rollouts", rollouts([6, 7]))
    assert store.table("rollouts").num_rows == 8


def test_only_training_rows_of_the_same_run_count(store: LocalStore) -> None:
    store.append("rollouts", rollouts(range(4)))
    store.append("rollouts", rollouts(range(10, 20), partition="eval"))
    store.append("rollouts", rollouts(range(20, 24), run_id="other"))
    store.append("scores", table("scores", [score("x0")]))
    with pytest.raises(StoreFullError, match="of run 'other'"):
        store.append("rollouts", rollouts(range(24, 26), run_id="other"))
    assert store.table("rollouts").num_rows == 18


def test_a_waiting_append_goes_on_when_another_thread_consumes(path: Path) -> None:
    with open_store(path, durability="process", back_pressure=BackPressure(rows=4, seconds=30)) as store:
        store.append("rollouts", rollouts(range(4)))
        store.append("decisions", decisions(range(4)))
        done = threading.Event()

        def explore() -> None:
            store.append("rollouts", rollouts([4, 5]))
            done.set()

        thread = threading.Thread(target=explore)
        thread.start()
        assert not done.wait(0.3)
        store.append("scores", table("scores", [score("x0")]))  # nobody else is held up
        train(store, 1)
        thread.join(timeout=30)
        assert done.is_set()
        assert store.table("rollouts").num_rows == 6
        assert store.verify() == []


WRITER = """
import sys
from store_rows import rollouts
from buffer_engine.store import BackPressure, open_store
with open_store(sys.argv[1], durability="process", back_pressure=BackPressure(rows=4, seconds=60)) as store:
    for first in range(int(sys.argv[2]), int(sys.argv[3]), 2):
        store.append("rollouts", rollouts([first, first + 1]))
"""


def test_writer_processes_wait_for_a_consumer_and_nothing_is_lost(path: Path) -> None:
    with open_store(path, durability="process") as store:
        children = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(path), str(first), str(first + 20)], env=child_environment()
            )
            for first in (0, 20)
        ]  # fmt: skip
        most, steps, deadline = 0, 0, time.monotonic() + 100
        while steps < 20 and time.monotonic() < deadline:
            state = store.rollout_state(status="new").column("experience_id").to_pylist()
            if state:
                store.append("decisions", decisions([int(one[1:]) for one in state]))
            waiting = store.rollout_state().to_pylist()
            most = max(most, sum(1 for row in waiting if row["uses"] == 0))
            if waiting and store.reserve(
                ReadPolicy.model_validate({"rows": 2}), run_id="run", batch_id="look", model_version=0
            ):
                store.release("look")
                steps += 1
                train(store, steps)
        assert [child.wait(timeout=30) for child in children] == [0, 0]
        assert store.table("rollouts").num_rows == 40
        assert most <= 4 + 2 * 2  # the bound, and one append of two rows from each writer
        assert store.verify() == []


@only_local("a plan of SQLite")
def test_counting_walks_an_index_and_no_further_than_the_bound(store: LocalStore) -> None:
    with sqlite3.connect(store.path / "catalog.sqlite") as connection:
        plan = connection.execute(
            "EXPLAIN QUERY PLAN SELECT count(*) FROM (SELECT 1 FROM index_rollouts WHERE run_id = 'run' "
            "AND partition = 'train' AND uses = 0 AND status IN ('new', 'held', 'kept') LIMIT 4)"
        ).fetchall()
    assert any("rollouts_waiting" in row[3] for row in plan), plan


def test_a_bound_that_lets_nothing_in_is_refused() -> None:
    with pytest.raises(StoreError, match="lets nothing in"):
        BackPressure(rows=0, seconds=1)
    with pytest.raises(StoreError, match="lets nothing in"):
        BackPressure(rows=1, seconds=-1)
