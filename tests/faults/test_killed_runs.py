"""A run that is killed again and again ends as if it had never been touched."""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest
from tiny_run import manifest_rows, trained_counts, write_specification

from buffer_engine.inspect.connect import connect_store
from buffer_engine.store import open_store

PRELOAD = ["torch", "transformers", "pipelines.runner", "explorers.local", "trainers.torch_trainer", "operators.engine"]
KILLS = 30
STEPS = 16
"""Enough that even a fast machine is not done before the last kill."""


def run_once(file: str) -> None:
    """Start or continue the run of a specification, as the command line does."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from rich.console import Console

    from pipelines.load import load_spec
    from pipelines.runner import start_run

    start_run(load_spec(Path(file)), Console(file=io.StringIO()))


def weights_digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
def test_a_run_killed_at_many_random_points_ends_with_the_same_batches_and_weights(
    tmp_path: Path, tiny_model: Path
) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    calm = write_specification(tmp_path, tiny_model, steps=STEPS, store="calm")
    stormy = write_specification(tmp_path, tiny_model, steps=STEPS, store="stormy")

    undisturbed = context.Process(target=run_once, args=(str(calm),))
    undisturbed.start()
    undisturbed.join(120)
    assert undisturbed.exitcode == 0

    dice = random.Random(20)
    acknowledged: set[str] = set()
    kills = 0
    while True:
        process = context.Process(target=run_once, args=(str(stormy),))
        process.start()
        # Later attempts get more time, so that the run gets on; the first ones die early, in set-up and imports.
        process.join(dice.uniform(0.05, 0.9 + 0.08 * kills))
        if process.exitcode is not None:
            assert process.exitcode == 0
            if kills >= KILLS:
                break
            pytest.fail(f"the run ended after only {kills} kills: give it more steps")
        if kills < KILLS:
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
            kills += 1
        else:
            process.join(120)
            assert process.exitcode == 0
            break
        if (tmp_path / "stormy" / "catalog.sqlite").exists():
            with open_store(tmp_path / "stormy", create=False) as store:
                present = set(store.rollout_state().column("experience_id").to_pylist())
                assert acknowledged <= present, "an acknowledged row is gone"
                acknowledged = present

    with open_store(tmp_path / "calm", create=False) as one, open_store(tmp_path / "stormy", create=False) as other:
        assert other.verify() == []
        assert manifest_rows(one.table("batch_rows")) == manifest_rows(other.table("batch_rows"))
        committed = {record.batch_id for record in other.batches("tiny") if record.status == "committed"}
        steps = [record.step for record in other.batches("tiny") if record.status == "committed"]
        assert len(steps) == len(set(steps))
        counts = trained_counts(other.table("batch_rows"), committed)
        assert set(counts.values()) == {1}
        uses = dict(
            zip(*(other.rollout_state().column(name).to_pylist() for name in ("experience_id", "uses")), strict=True)
        )
        assert {row: number for row, number in uses.items() if number} == counts
    with connect_store(tmp_path / "stormy") as inspection:
        assert inspection.query("SELECT * FROM conservation WHERE NOT balanced").num_rows == 0
        assert inspection.query("SELECT * FROM conservation").num_rows > 0
    assert weights_digest(tmp_path / "calm" / "weights" / "tiny") == weights_digest(
        tmp_path / "stormy" / "weights" / "tiny"
    )
