"""One tiny run for all lineage tests: what its trainer received, and a store in which much has happened since."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console
from store_rows import decision, table
from tiny_run import write_specification

from buffer_engine.scoring import add_scores
from buffer_engine.store import open_store
from pipelines.load import load_spec
from pipelines.runner import start_run
from trainers.base import StepReport, TrainBatch

Trained = tuple[Path, dict[int, TrainBatch]]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Trained:
    """A run of five steps with what its trainer received, after late scores, verdicts and a second run."""
    from trainers.torch_trainer import TorchTrainer

    folder = tmp_path_factory.mktemp("rebuild")
    received: dict[int, TrainBatch] = {}
    original = TorchTrainer.train_step

    def noting(self: TorchTrainer, batch: TrainBatch) -> StepReport:
        received.setdefault(batch.step, batch)
        return original(self, batch)

    patch = pytest.MonkeyPatch()
    patch.setattr(TorchTrainer, "train_step", noting)
    try:
        file = write_specification(folder, tiny_model, steps=5)
        start_run(load_spec(file), Console(file=io.StringIO()))
        captured = dict(received)
        start_run(load_spec(file), Console(file=io.StringIO()))  # a second run in the same store
    finally:
        patch.undo()
    store_folder = folder / "store"
    with open_store(store_folder, durability="process") as store:
        ids = sorted({row for batch in captured.values() for row in batch.rows.column("experience_id").to_pylist()})
        add_scores(store, pa.table({"experience_id": ids, "value": [0.125] * len(ids)}), name="right", author="ann")
        for verdict in ("mask", "reject"):
            rows = [decision(row, verdict, run_id="tiny", pass_id="late", operator="people") for row in ids]
            store.append("decisions", table("decisions", rows))
    return store_folder, captured
