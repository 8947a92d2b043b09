"""Eight writers, four readers, an operator, a trainer and a compactor for a while, every reader checking all it sees.

`make soak` does it for ten minutes; the environment variable SOAK_SECONDS says for how long otherwise.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fault_harness import Harness
from fault_roles import promised

SECONDS = float(os.environ.get("SOAK_SECONDS", "30"))
CAST = {"writer": 8, "reader": 4, "operator": 1, "trainer": 1, "compactor": 1}


@pytest.mark.slow
@pytest.mark.timeout(int(SECONDS) * 4 + 600)
def test_many_processes_work_on_one_store_and_every_reader_sees_it_whole(tmp_path: Path) -> None:
    harness = Harness(tmp_path, CAST, seed=1, pause=0.05)
    harness.run(seconds=SECONDS)
    assert harness.finish() == []
    looks = len(promised(harness.logs, "looked"))
    moved = sum(map(int, promised(harness.logs, "compacted")))
    print(f"\n{harness.tally.rows} rows, {harness.tally.batches} batches, {looks} looks of readers, {moved} rows moved")
    assert moved >= harness.tally.rows // 2
    assert harness.tally.kills.total() == 0
    assert looks >= SECONDS  # every look is a check of the whole store
    assert len(promised(harness.logs, "rows")) == harness.tally.rows
