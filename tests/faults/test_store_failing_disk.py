"""A disk that reports errors, at the border to the kernel: each system call of a small piece of work fails once.

`strace` makes the calls fail, so SQLite and Arrow meet the errors as they would meet real ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from failing_disk import STRACE, failing, train, words
from fault_roles import RUN
from store_rows import rollouts

from buffer_engine.store import open_store

CALLS = [
    ("fdatasync", "EIO", 1),
    ("fsync", "EIO", 1),
    ("fallocate", "ENOSPC", 1),
    ("fallocate", "EIO", 1),
    ("rename", "EIO", 1),
    ("pwrite64", "EIO", 7),
    ("pwrite64", "ENOSPC", 11),
]
"""(system call, error, every how manyth use fails): syncs one by one, of the many page writes a share."""
LIMIT = 400


@pytest.mark.slow
@pytest.mark.skipif(STRACE is None, reason="failing system calls from outside needs strace")
@pytest.mark.parametrize(("call", "error", "every"), CALLS)
def test_a_system_call_that_fails_costs_nothing_that_was_acknowledged(
    tmp_path: Path, call: str, error: str, every: int
) -> None:
    failed = refused = 0
    for which in range(1, LIMIT, every):
        folder, acknowledgements = tmp_path / f"s{which}", tmp_path / f"{which}.log"
        try:
            met = failing(folder, acknowledgements, call, error, which)
        except PermissionError as denied:
            pytest.skip(f"this user may not trace processes: {denied}")
        if not met:
            break  # the work does not use the call that often
        failed += 1
        said = words(acknowledgements, "refused")
        refused += bool(said)
        # a person is told what failed and what to do
        assert all(any(hint in one for hint in ("check the disk", "free space", "repeat", "verify")) for one in said), (
            said
        )
        check(folder, acknowledgements)
    print(f"\n{call} {error}: {failed} failures, {refused} of them refused something")
    assert failed >= 3
    assert refused >= 1


def check(folder: Path, acknowledgements: Path) -> None:
    """What was acknowledged is there, the store is sound, and it goes on."""
    with open_store(folder) as store:
        assert store.verify() == []
        ids = set(store.table("rollouts", columns=["experience_id"]).column(0).to_pylist())
        promised = {f"x{number}" for line in words(acknowledgements, "rows") for number in line.split()}
        assert promised <= ids
        status = {record.batch_id: record.status for record in store.batches(RUN)}
        if words(acknowledgements, "committed") and status:
            assert status["b1"] == "committed"
        if words(acknowledgements, "scored"):
            assert store.narrow("scores", ["x0"]).num_rows == 1
        store.append("rollouts", rollouts(range(20, 24)))
        train(store)
        store.compact(everything=True, grace_seconds=0.0)
        assert set(store.rollout_state().column("uses").to_pylist()) <= {0, 1}
        assert store.verify() == []
