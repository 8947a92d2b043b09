"""Writers, operator, trainers, compactor and readers on one store, all killed again and again: promises are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_harness import Harness
from fault_roles import POINTS, open_for_test, promised

from buffer_engine.store import LocalStore
from buffer_engine.store.recover import recover_store

KILLS = 320
CAST = {"writer": 3, "operator": 1, "trainer": 2, "reader": 1, "compactor": 1}


@pytest.mark.slow
def test_three_hundred_kills_of_many_processes_lose_double_and_skip_nothing(tmp_path: Path) -> None:
    harness = Harness(tmp_path, CAST, seed=20_261_201)
    harness.run(kills=KILLS)
    tally = harness.tally
    assert harness.finish() == []
    print(f"\n{tally}")
    with open_for_test(harness.store, read_only=True) as store:
        before = statuses(store)
    assert sum(tally.kills.values()) >= KILLS
    assert min(tally.kills[role] for role in CAST) >= 5
    assert all(tally.ways[way] for way in ("timed", "at a call", *POINTS))
    assert tally.checks >= 100  # one check may follow several deaths
    assert tally.rows >= 500
    assert tally.batches >= 50
    assert sum(map(int, promised(harness.logs, "compacted"))) >= 500
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


def statuses(store: LocalStore) -> dict[str, tuple[str, int]]:
    """Status and uses of every rollout."""
    columns = (store.rollout_state().column(name).to_pylist() for name in ("experience_id", "status", "uses"))
    return {one: (status, uses) for one, status, uses in zip(*columns, strict=True)}
