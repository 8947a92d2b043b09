"""Writers, operator, trainers, compactor and readers on one store, all killed again and again: promises are kept."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from backends import open_store
from fault_harness import Harness
from fault_roles import POINTS, SHARED_POINTS, open_for_test, promised
from store_rows import rollouts

from buffer_engine.store import LocalStore
from buffer_engine.store.recover import recover_store

KILLS = 320
SHARED_KILLS = 40
CAST = {"writer": 3, "operator": 1, "trainer": 2, "reader": 1, "compactor": 1}


@pytest.mark.slow
def test_three_hundred_kills_of_many_processes_lose_double_and_skip_nothing(tmp_path: Path) -> None:
    harness = Harness(tmp_path, CAST, seed=20_261_201)
    harness.run(kills=KILLS)
    tally = harness.tally
    assert harness.finish() == []
    print(f"\n{tally}")
    with open_for_test(harness.store, read_only=True) as store:
        before, cold = statuses(store), store.info().cold_bytes
    assert sum(tally.kills.values()) >= KILLS
    assert min(tally.kills[role] for role in CAST) >= 5
    assert all(tally.ways[way] for way in ("timed", "at a call", *POINTS))
    assert tally.checks >= 100  # one check may follow several deaths
    assert tally.rows >= 300
    assert tally.batches >= 30
    assert cold["rollouts"] > 0
    assert cold["scores"] > 0
    # the segments of a store that was killed so often tell the same once the catalog is gone
    for file in harness.store.glob("catalog.sqlite*"):
        file.unlink()
    found = recover_store(harness.store, tmp_path / "recovered", durability="process")
    assert found.findings == []
    assert found.left_out == []
    with open_for_test(tmp_path / "recovered", read_only=True) as store:
        after = statuses(store)
    assert {f"x{number}" for number in promised(harness.logs, "rows")} <= set(after)
    # rows that a writer was killed over may be there as well: nobody was told, and nobody has judged them
    assert set(before.items()) <= set(after.items())
    assert {state for one, state in after.items() if one not in before} <= {("new", 0)}


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize("backend", ["shared"], indirect=True)
@pytest.mark.usefixtures("backend")
def test_kills_of_many_processes_lose_double_and_skip_nothing_on_shared_servers(tmp_path: Path) -> None:
    cast = {"writer": 2, "operator": 1, "trainer": 1, "reader": 1, "compactor": 1}
    begun = time.monotonic()
    with open_store(tmp_path / "try", durability="process") as store:
        store.append("rollouts", rollouts([0, 1]))
    # processes must live long enough to do something, however busy the machine is
    harness = Harness(tmp_path, cast, seed=20_261_202, slow=max(5, round(30 * (time.monotonic() - begun))))
    harness.run(kills=SHARED_KILLS)
    # who is killed between an object and its commit leaves the object
    assert {finding.kind for finding in harness.finish()} <= {"orphan"}
    tally = harness.tally
    print(f"\n{tally}")
    assert sum(tally.kills.values()) >= SHARED_KILLS
    assert set(tally.kills) == set(cast)
    assert tally.ways["at a call"]
    assert any(tally.ways[way] for way in SHARED_POINTS)
    assert tally.rows >= 20
    assert tally.batches >= 2
    with open_for_test(harness.store, read_only=True) as store:
        assert store.info().cold_bytes["rollouts"] > 0


def statuses(store: LocalStore) -> dict[str, tuple[str, int]]:
    """Status and uses of every rollout."""
    columns = (store.rollout_state().column(name).to_pylist() for name in ("experience_id", "status", "uses"))
    return {one: (status, uses) for one, status, uses in zip(*columns, strict=True)}
