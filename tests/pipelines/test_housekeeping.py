"""Compaction and retention beside a run: the run trains the same, its store is smaller."""

from __future__ import annotations

import io
import sqlite3
from concurrent.futures import wait
from pathlib import Path

import pyarrow.compute as pc
import pytest
from rich.console import Console
from store_rows import decisions, manifest, rollouts
from tiny_run import manifest_rows, write_specification

from buffer_engine.errors import StoreError, TrainingError
from buffer_engine.store import LocalStore, open_store
from buffer_engine.store.base import ReadPolicy
from buffer_engine.store.sweep import hold_compaction
from pipelines.housekeeping import CompactSection, Housekeeper, RetainSection
from pipelines.lineage.rebuild import rebuild_batch
from pipelines.load import load_spec
from pipelines.retention import parse_age, refuse_erased, replayed_after
from pipelines.runner import RunReport, start_run


@pytest.fixture(autouse=True)
def _few_rows_are_worth_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer_engine.store.merging.FEWEST_FRAMES", 1)
    monkeypatch.setattr("buffer_engine.store.merging.NEWEST_FRAMES", 2)


def run(file: Path, *overrides: str) -> RunReport:
    return start_run(load_spec(file, overrides=overrides), Console(file=io.StringIO()))


def formats(folder: Path, name: str) -> set[str]:
    with sqlite3.connect(folder / "catalog.sqlite") as catalog:
        found = catalog.execute(
            "SELECT DISTINCT format FROM frames JOIN segments USING (segment_id) WHERE frames.tbl = ?", (name,)
        )
        return {row[0] for row in found.fetchall()}


def test_a_run_with_housekeeping_trains_the_same_rows_to_the_same_weights(tmp_path: Path, tiny_model: Path) -> None:
    plain = run(write_specification(tmp_path, tiny_model, steps=5, store="plain"))
    kept = run(
        write_specification(tmp_path, tiny_model, steps=5, store="kept"),
        "store.compact={every_steps: 1, grace_seconds: 0}",
        "store.retain=[{trained_steps_ago: 1, reason: tested}]",
    )
    with open_store(plain.folder) as first, open_store(kept.folder) as second:
        assert manifest_rows(first.table("batch_rows")) == manifest_rows(second.table("batch_rows"))
        assert second.verify() == []
        kinds = second.table("events").column("kind").to_pylist()
        assert kinds.count("compacted") >= 2
        assert "erased" in kinds
        gone = second.table("erasures")
        assert set(gone.column("rule").to_pylist()) <= {
            f"last trained before step {step}, run {kept.run_id}" for step in (2, 3, 4)
        }
        state = second.rollout_state()
        last = {row["experience_id"]: row["trained_step"] for row in state.to_pylist()}
        assert all(last[one] <= 3 for one in gone.column("experience_id").to_pylist())
        assert gone.num_rows > 0
    weights = [report.outcome.final_weights for report in (plain, kept)]
    assert weights[0] is not None
    assert weights[1] is not None
    assert (weights[0] / "model.safetensors").read_bytes() == (weights[1] / "model.safetensors").read_bytes()
    assert "parquet" in formats(kept.folder, "rollouts")
    assert formats(plain.folder, "rollouts") == {"arrows"}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Eight rows, four of them trained at steps 1 to 4, four rejected."""
    opened = open_store(tmp_path / "store", durability="process")
    opened.append("rollouts", rollouts(range(8), group_size=1))
    opened.append_all({"decisions": decisions(range(4))})
    opened.append_all({"decisions": decisions(range(4, 8), "reject")})
    for step in range(1, 5):
        held = opened.reserve(ReadPolicy(rows=1), run_id="run", batch_id=f"run/{step}", model_version=step - 1)
        assert held is not None
        batch, rows = manifest(held.batch_id, step, held.experience_ids)
        opened.prepare_batch(held, step=step, batch=batch, rows=rows)
        opened.commit_batch(held.batch_id, step=step)
    return opened


def housekeeper(store: LocalStore, *retain: RetainSection, every: int = 1) -> Housekeeper:
    compact = CompactSection.model_validate({"every_steps": every, "grace_seconds": 0})
    return Housekeeper(store, store.path, "run", compact=compact, retain=retain, max_uses=1)


def retain(**rule: object) -> RetainSection:
    return RetainSection.model_validate({"reason": "tested", **rule})


def test_rows_that_a_resumed_run_would_train_again_are_not_erased(store: LocalStore) -> None:
    rule = retain(trained_steps_ago=1)
    # no checkpoint yet: every step would be trained again
    with housekeeper(store, rule) as keeper:
        keeper.after_step(5)
    assert store.table("erasures").num_rows == 0
    for step in (2, 4):
        folder = store.path / "checkpoints/run" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
    assert replayed_after(store, store.path) == {"run": 2}
    with housekeeper(store, rule) as keeper:
        keeper.after_step(5)
    # trained before step 4, and by the oldest checkpoint
    assert store.table("erasures").column("experience_id").to_pylist() == ["x0", "x1"]
    store.close()


def test_rejected_rows_are_erased_by_age(store: LocalStore) -> None:
    with housekeeper(store, retain(rejected_older_than="1d")) as keeper:
        keeper.after_step(1)
    assert store.table("erasures").column("experience_id").to_pylist() == ["x4", "x5", "x6", "x7"]
    assert store.table("erasures").column("author").to_pylist()[0] == "run run"
    store.close()


def test_a_turn_comes_every_so_many_steps_and_at_the_end(store: LocalStore) -> None:
    with housekeeper(store, every=3) as keeper:
        for step in range(1, 6):
            keeper.after_step(step)
            store.append("rollouts", rollouts([100 + step], partition="eval"))
            if keeper._running is not None:
                wait([keeper._running])
    events = store.table("events")
    steps = events.filter(pc.equal(events.column("kind"), "compacted")).column("step").to_pylist()
    assert steps == [3, 5]
    # the last turn leaves the files that the run appended to, so that they can go
    assert store.info().retired_bytes == 0
    assert not list((store.path / "segments/rollouts").glob("*.arrows"))
    store.close()


def test_somebody_else_compacting_is_noted_and_does_not_stop_the_run(store: LocalStore) -> None:
    with hold_compaction(store._catalog), housekeeper(store) as keeper:
        keeper.after_step(1)
    kinds = store.table("events").column("kind").to_pylist()
    assert set(kinds) == {"housekeeping_left_out"}
    store.close()


def test_a_turn_that_fails_stops_the_run_with_its_error(store: LocalStore) -> None:
    (store.path / "making").write_text("in the way")
    keeper = housekeeper(store)
    keeper.after_step(1)
    assert keeper._running is not None
    wait([keeper._running])
    with pytest.raises(StoreError, match="lock the store for compaction"):
        keeper.after_step(2)
    store.close()


def test_a_batch_whose_rows_were_erased_cannot_be_rebuilt_and_says_so(store: LocalStore) -> None:
    assert rebuild_batch(store, step=1, run_id="run").batch.rows.num_rows == 1
    with housekeeper(store, retain(rejected_older_than="1d")) as keeper:
        keeper.after_step(1)
    rebuild_batch(store, step=1, run_id="run")
    from buffer_engine.store.erase import EraseRule

    store.erase(EraseRule(experience_ids=("x0",)), reason="licence ended", author="ada")
    with pytest.raises(TrainingError, match=r"batch run/1: the payload of x0 was erased \(.* by ada: licence ended\)"):
        rebuild_batch(store, step=1, run_id="run")
    refuse_erased(store, ["x1"], doing="nothing")
    store.close()


def test_ages() -> None:
    assert parse_age("90s") == (90.0, None)
    assert parse_age("1.5h") == (5400.0, None)
    assert parse_age("7d") == (604_800.0, None)
    assert parse_age("500v") == (None, 500)
    for wrong in ("7", "d", "7y", "-1d", "1.5v", ""):
        with pytest.raises(ValueError, match="is no age"):
            parse_age(wrong)
