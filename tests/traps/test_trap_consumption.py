"""Traps around consumption: steps without a record, staleness of the newest token, rows trained twice after a crash."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from store_rows import decisions, rollout, table
from tiny_run import write_specification

from buffer_engine.errors import TrainingError
from buffer_engine.inspect import connect_store
from buffer_engine.store import open_store
from buffer_engine.store.base import ReadPolicy
from pipelines.load import load_spec
from pipelines.runner import start_run
from trainers.base import StepReport, TrainBatch
from trainers.torch_trainer import TorchTrainer


def run(file: Path) -> None:
    start_run(load_spec(file), Console(file=io.StringIO()))


def test_the_record_of_a_step_is_there_before_the_step_and_is_what_is_trained_later(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap: the batch is recorded after the step, so a crash inside it leaves weights that nobody can explain."""
    file = write_specification(tmp_path, tiny_model, steps=2)
    whole = TorchTrainer.train_step

    def fails_at_two(trainer: TorchTrainer, batch: TrainBatch) -> StepReport:
        if batch.step == 2:
            raise TrainingError("the power went out")
        return whole(trainer, batch)

    with monkeypatch.context() as patched:
        patched.setattr(TorchTrainer, "train_step", fails_at_two)
        with pytest.raises(TrainingError, match="power"):
            run(file)

    with open_store(tmp_path / "store") as store:
        assert [(record.step, record.status) for record in store.batches("tiny")] == [
            (1, "committed"), (2, "prepared")
        ]  # fmt: skip
        batch = store.table("batches").to_pylist()[1]
        promised = [row for row in store.table("batch_rows").to_pylist() if row["batch_id"] == "tiny/2"]
        assert batch["model_version"] == 1
        assert batch["config_hash"] == load_spec(file).config_hash
        assert json.loads(batch["rng_json"]) == {"seed": 11, "step": 2}
        assert json.loads(batch["reader_json"])["max_staleness"] == 2
        assert all(row["advantage"] is not None for row in promised)
        assert all(json.loads(row["score_versions_json"])["right"] == 1 for row in promised)
        uses = store.rollout_state().to_pylist()
        assert {row["uses"] for row in uses if row["experience_id"] in {one["experience_id"] for one in promised}} == {
            0
        }

    run(file)
    with open_store(tmp_path / "store") as store:
        assert {record.status for record in store.batches("tiny")} == {"committed"}
        again = [row for row in store.table("batch_rows").to_pylist() if row["batch_id"] == "tiny/2"]
        assert again == promised
        assert max(row["uses"] for row in store.rollout_state().to_pylist()) == 1
        assert store.verify() == []


def test_staleness_is_that_of_the_oldest_token_in_the_group(tmp_path: Path) -> None:
    """Trap: a row begun five versions ago passes as fresh because its last token, or its sibling, is new."""
    spanning = [{"version": 1, "length": 1}, {"version": 6, "length": 1}]
    rows = [
        rollout(0, model_version=1, token_versions=spanning),
        rollout(1, model_version=6, token_versions=[{"version": 6, "length": 2}]),
        rollout(2, model_version=4, token_versions=[{"version": 4, "length": 2}]),
        rollout(3, model_version=6, token_versions=[{"version": 6, "length": 2}]),
    ]
    with open_store(tmp_path / "s", durability="process") as store:
        store.append_all({"rollouts": table("rollouts", rows), "decisions": decisions([0, 1, 2, 3])})
        taken = store.reserve(ReadPolicy(max_staleness=2), run_id="run", batch_id="b", model_version=6)
        # 6 − 1 = 5 is too old and takes its sibling along; 6 − 4 = 2 is allowed
        assert taken is not None
        assert taken.experience_ids == ("x2", "x3")
        with connect_store(store) as inspection:
            counted = inspection.rows("SELECT operator, reason, count(*) AS n FROM drops GROUP BY ALL")
    assert counted == [{"operator": "reader", "reason": "stale", "n": 2}]
