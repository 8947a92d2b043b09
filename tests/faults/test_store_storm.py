"""Writers, operator, trainers and readers on one store, all killed again and again at once: every promise is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_harness import Harness
from fault_roles import POINTS

KILLS = 320
CAST = {"writer": 3, "operator": 1, "trainer": 2, "reader": 1}


@pytest.mark.slow
def test_three_hundred_kills_of_many_processes_lose_double_and_skip_nothing(tmp_path: Path) -> None:
    harness = Harness(tmp_path, CAST, seed=20_261_201)
    harness.run(kills=KILLS)
    tally = harness.tally
    assert harness.finish() == []
    print(f"\n{tally}")
    assert sum(tally.kills.values()) >= KILLS
    assert min(tally.kills[role] for role in CAST) >= 5
    assert all(tally.ways[way] for way in ("timed", "at a call", *POINTS))
    assert tally.checks >= 200
    assert tally.rows >= 500
    assert tally.batches >= 50
