"""SIGKILL at many seeded points of a process that writes and trains: nothing is lost, nothing counts twice."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from store_rows import rollout
from store_workload import fast_processes, live

from buffer_engine.store import open_store

SELF_KILLS = 64
TIMED_KILLS = 12


def acknowledged(path: Path, what: str) -> set[int]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(number) for line in lines if line.split()[0] == what for number in line.split()[1:]}


def check(folder: Path, acks: Path, *, everything: bool = True) -> None:
    with open_store(folder, durability="process") as store:
        if everything:
            assert store.verify() == []
        rows = store.table("rollouts")
        ids = rows.column("experience_id").to_pylist()
        assert len(set(ids)) == len(ids)
        missing = {f"x{number}" for number in acknowledged(acks, "rows")} - set(ids)
        assert missing == set()
        state = {row["experience_id"]: row for row in store.rollout_state().to_pylist()}
        assert [number for number in acknowledged(acks, "kept") if state[f"x{number}"]["status"] != "kept"] == []
        batches = {record.step: record for record in store.batches("run") if record.step is not None}
        assert [step for step in acknowledged(acks, "prepared") if step not in batches] == []
        assert [step for step in acknowledged(acks, "committed") if batches[step].status != "committed"] == []
        committed = [
            row
            for row in store.table("batch_rows").to_pylist()
            if batches[int(row["batch_id"][1:])].status == "committed"
        ]
        uses = [state[row["experience_id"]]["uses"] for row in committed]
        assert uses == [1] * len(committed)
        assert sum(row["uses"] for row in state.values()) == len(committed)


@pytest.mark.slow
def test_no_kill_loses_an_acknowledged_row_or_counts_a_batch_twice(tmp_path: Path) -> None:
    context, dice = fast_processes(), random.Random(20250101)
    folder, acks = tmp_path / "s", tmp_path / "acks"
    killed = 0
    for attempt in range(SELF_KILLS + TIMED_KILLS):
        # most processes die at a random call of their own, wherever that is (between write, sync and commit too);
        # some are killed from outside at a random moment, which may fall inside a system call
        calls = dice.randrange(20, 6_000) if attempt < SELF_KILLS else 0
        child = context.Process(target=live, args=(str(folder), str(acks), calls, 3 if calls else 1_000))
        child.start()
        if not calls:
            time.sleep(dice.uniform(0.02, 0.5))
            child.kill()
        child.join(60)
        assert child.exitcode in (-signal.SIGKILL, 0), f"attempt {attempt}: exit code {child.exitcode}"
        killed += child.exitcode == -signal.SIGKILL
        if folder.exists():
            check(folder, acks, everything=attempt % 8 == 0)  # the whole store is read often enough to find damage
    assert killed >= 60
    child = context.Process(target=live, args=(str(folder), str(acks), 0, 2))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    check(folder, acks)
    with open_store(folder) as store:
        rows = store.table("rollouts").to_pylist()
        assert rows == [rollout(number) for number in range(len(rows))]
        # first come first served, and manifests are replayed: the batches are those of a run that was never killed
        trained = [row["experience_id"] for row in store.table("batch_rows").to_pylist()]
        assert trained == [f"x{number}" for number in range(len(trained))]
        assert len(trained) >= 100
        assert len(acknowledged(acks, "rows")) >= 200
