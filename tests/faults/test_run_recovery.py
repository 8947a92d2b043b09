"""Runs that stop at awkward places, or whose files change while they are stopped: what is true afterwards."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_model import make_tiny_model
from tiny_run import manifest_rows, write_specification

from buffer_engine.errors import BufferEngineError, ConfigError, StarvedError
from buffer_engine.inspect import connect_store
from buffer_engine.store import open_store
from pipelines import evaluation, loop
from pipelines.curate import Curator
from pipelines.load import load_spec
from pipelines.loop import Loop
from pipelines.runner import RunReport, resume_run, start_run
from trainers.torch_trainer import TorchTrainer


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


def run(file: Path, *overrides: str) -> RunReport:
    return start_run(load_spec(file, overrides=overrides), Console(file=io.StringIO()))


def resume(store: Path, *overrides: str) -> RunReport:
    return resume_run(store, Console(file=io.StringIO()), overrides=overrides)


def die_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, call: int, after: bool = False) -> None:
    """End the run at the `call`-th call of `owner.name`, before or after it."""
    real: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def dying(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            raise Killed
        result = real(*arguments, **options)
        if calls == call:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, dying)


def run_until(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, file: Path, *overrides: str, call: int, after: bool = False
) -> None:
    """Run `file` until it dies at the `call`-th call of `owner.name`."""
    with monkeypatch.context() as patch:
        die_at(patch, owner, name, call=call, after=after)
        with pytest.raises(Killed):
            run(file, *overrides)


def final_weights(store: Path) -> bytes:
    return (store / "weights" / "tiny" / "model.safetensors").read_bytes()


def metrics(store: Path, name: str) -> dict[int, float]:
    with connect_store(store) as inspection:
        rows = inspection.rows(f"SELECT step, value FROM metrics WHERE name = '{name}' ORDER BY step")
    return {row["step"]: row["value"] for row in rows}


def sound(store: Path) -> None:
    with open_store(store) as opened:
        assert opened.verify() == []
    with connect_store(store) as inspection:
        assert inspection.rows("SELECT * FROM conservation WHERE NOT balanced") == []


@pytest.fixture
def calm(tmp_path: Path, tiny_model: Path) -> Path:
    """Store of an undisturbed run of six steps."""
    return run(write_specification(tmp_path, tiny_model, steps=6, store="calm")).folder


def test_final_weights_are_written_by_the_resumed_run_when_the_first_died_before_them(
    tmp_path: Path, tiny_model: Path, calm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_specification(tmp_path, tiny_model, steps=6)
    run_until(monkeypatch, TorchTrainer, "save_weights", file, call=1)
    assert not (tmp_path / "store" / "weights").exists()
    resume(tmp_path / "store")
    assert final_weights(tmp_path / "store") == final_weights(calm)
    sound(tmp_path / "store")


@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_evaluation_and_its_numbers_are_stored_together(
    tmp_path: Path, tiny_model: Path, calm: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    file = write_specification(tmp_path, tiny_model, steps=6)
    run_until(monkeypatch, loop, "evaluate", file, call=call, after=True)
    resume(tmp_path / "store")
    name = "eval/heldout/solve_rate"
    assert metrics(tmp_path / "store", name) == metrics(calm, name)
    assert sorted(metrics(calm, name)) == [0, 3, 6]


def test_a_curation_pass_and_its_numbers_are_stored_together(
    tmp_path: Path, tiny_model: Path, calm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_specification(tmp_path, tiny_model, steps=6)
    run_until(monkeypatch, Curator, "curate_new", file, call=4, after=True)
    resume(tmp_path / "store")
    for name in ("explore/reward_mean", "curate/kept", "explore/ended"):
        assert metrics(tmp_path / "store", name) == metrics(calm, name)


def test_a_catalog_older_than_the_checkpoint_is_noticed_and_an_older_start_is_taken(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_specification(tmp_path, tiny_model, steps=6)
    store = tmp_path / "store"
    run_until(monkeypatch, TorchTrainer, "train_step", file, call=3)
    shutil.copytree(store, tmp_path / "older")
    run_until(monkeypatch, TorchTrainer, "train_step", file, call=4)
    assert (store / "checkpoints" / "tiny" / "step-000003").exists()
    # The catalog and its rows go back to before step 3 was committed; the checkpoint of step 3 stays.
    for name in ("segments", "catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm"):
        old, new = tmp_path / "older" / name, store / name
        if new.is_dir():
            shutil.rmtree(new)
            shutil.copytree(old, new)
        else:
            new.unlink(missing_ok=True)
            if old.exists():
                shutil.copy2(old, new)
    resume(store)
    with connect_store(store) as inspection:
        events = inspection.rows("SELECT detail FROM events WHERE kind = 'checkpoint_set_aside'")
        states = inspection.rows("SELECT DISTINCT status FROM batches")
    assert "step-000003" in events[0]["detail"]
    assert states == [{"status": "committed"}]
    sound(store)


def test_a_damaged_checkpoint_is_set_aside_and_the_result_is_the_same(
    tmp_path: Path, tiny_model: Path, calm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_specification(tmp_path, tiny_model, steps=6)
    store = tmp_path / "store"
    run_until(monkeypatch, TorchTrainer, "train_step", file, call=5)
    damaged = max((store / "checkpoints" / "tiny" / "step-000003" / "trainer").glob("*.safetensors"))
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    report = resume(store)
    assert report.outcome.replayed_steps == 5
    assert final_weights(store) == final_weights(calm)
    assert list((store / "checkpoints" / "tiny").glob("unusable-step-000003"))


def test_a_torn_checkpoint_state_is_set_aside_too(
    tmp_path: Path, tiny_model: Path, calm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_specification(tmp_path, tiny_model, steps=6)
    store = tmp_path / "store"
    run_until(monkeypatch, TorchTrainer, "train_step", file, call=5)
    state = store / "checkpoints" / "tiny" / "step-000003" / "state.json"
    state.write_text(state.read_text()[:20])
    resume(store)
    assert final_weights(store) == final_weights(calm)


def test_another_model_in_the_same_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "model", seed=1)
    file = write_specification(tmp_path, model, steps=3)
    run_until(monkeypatch, TorchTrainer, "train_step", file, call=2)
    make_tiny_model(model, seed=2)
    with pytest.raises(ConfigError, match="model policy"):
        resume(tmp_path / "store")


def test_other_tasks_in_the_same_file_are_refused(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_specification(tmp_path, tiny_model, steps=3)
    run_until(monkeypatch, TorchTrainer, "train_step", file, call=2)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(tasks.read_text().replace("say one", "say none"))
    with pytest.raises(ConfigError, match=r"tasks (train|heldout)"):
        resume(tmp_path / "store")


def test_a_run_goes_on_after_a_change_of_the_code_before_its_first_checkpoint(
    tmp_path: Path, tiny_model: Path, calm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_specification(tmp_path, tiny_model, steps=6)
    with monkeypatch.context() as patch:
        patch.setattr("pipelines.rows.code_commit", lambda: "an older commit")
        die_at(patch, TorchTrainer, "train_step", call=2)
        with pytest.raises(Killed):
            run(file)
    resume(tmp_path / "store")
    assert final_weights(tmp_path / "store") == final_weights(calm)


def test_skipped_steps_between_publications_do_not_change_a_resumed_run(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def specification(store: str) -> Path:
        file = write_specification(tmp_path, tiny_model, steps=8, store=store)
        text = file.read_text().replace("every_steps: 3, keep", "every_steps: 2, keep")
        file.write_text(text.replace("on_starved: skip", "on_starved: skip\n  publish_every: 2\n  max_refills: 0"))
        return file

    # A batch of four groups, and some groups are rejected in every step: the first steps at least are skipped.
    limits = ("trainer.read.min_rows=16",)
    calm = run(specification("calm"), *limits)
    assert 0 < calm.outcome.skipped_steps < 8
    run_until(monkeypatch, Loop, "_train", specification("store"), *limits, call=6)
    resume(tmp_path / "store")
    with open_store(calm.folder) as one, open_store(tmp_path / "store") as other:
        assert manifest_rows(one.table("batch_rows")) == manifest_rows(other.table("batch_rows"))
    assert final_weights(calm.folder) == final_weights(tmp_path / "store")


def test_a_resumed_run_takes_a_changed_value_and_notes_it(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_specification(tmp_path, tiny_model, steps=4)
    run_until(monkeypatch, TorchTrainer, "train_step", file, call=3)
    resume(tmp_path / "store", "trainer.optimizer.learning_rate=0.001")
    with connect_store(tmp_path / "store") as inspection:
        events = inspection.rows("SELECT detail FROM events WHERE kind = 'configuration_changed'")
        hashes = inspection.rows("SELECT count(DISTINCT config_hash) AS n FROM batches")
    assert events == [{"detail": "trainer.optimizer.learning_rate=0.001"}]
    assert hashes == [{"n": 2}]
    assert list((tmp_path / "store" / "specs").glob("*.yaml.old"))


def test_a_starved_step_that_is_resumed_still_says_what_was_rejected(tmp_path: Path, tiny_model: Path) -> None:
    file = write_specification(tmp_path, tiny_model, steps=2)
    file.write_text(
        file.read_text().replace("  - {id: ended", "  - {type: length_filter, unit: token, min: 50}\n  - {id: ended")
    )
    overrides = ("loop.on_starved=error", "loop.max_refills=1")
    for _ in range(2):
        with pytest.raises(StarvedError, match="length_filter: too_short 32"):
            run(file, *overrides)


def test_a_run_without_its_saved_specification_is_continued_from_the_same_file(
    tmp_path: Path, tiny_model: Path, calm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_specification(tmp_path, tiny_model, steps=6)
    run_until(monkeypatch, TorchTrainer, "train_step", file, call=3)
    (tmp_path / "store" / "specs" / "tiny.yaml").unlink()
    assert run(file).run_id == "tiny"
    assert final_weights(tmp_path / "store") == final_weights(calm)


def test_a_run_that_never_trains_is_a_failure_that_names_the_reasons(tmp_path: Path, tiny_model: Path) -> None:
    file = write_specification(tmp_path, tiny_model, steps=2)
    file.write_text(
        file.read_text().replace("  - {id: ended", "  - {type: length_filter, unit: token, min: 50}\n  - {id: ended")
    )
    with pytest.raises(StarvedError, match=r"trained nothing in 2 steps.*length_filter: too_short"):
        run(file, "loop.max_refills=0")


def test_an_evaluation_without_a_scored_row_solves_nothing(tmp_path: Path, tiny_model: Path) -> None:
    file = write_specification(tmp_path, tiny_model, steps=3)
    file.write_text(file.read_text().replace("mode: regex,", "mode: regex, where: partition = 'train',"))
    report = run(file)
    assert set(metrics(report.folder, "eval/heldout/solve_rate").values()) == {0.0}


@pytest.mark.parametrize("line", ['{"question": "x\\ud800y", "wanted": "a"}', "[" * 3000 + "]" * 3000])
def test_text_that_is_no_text_is_refused_with_its_line(tmp_path: Path, tiny_model: Path, line: str) -> None:
    file = write_specification(tmp_path, tiny_model)
    with open(tmp_path / "tasks.jsonl", "a") as tasks:
        tasks.write(line + "\n")
    number = len((tmp_path / "tasks.jsonl").read_text().splitlines())
    with pytest.raises(BufferEngineError, match=rf"tasks\.jsonl:{number}: "):
        run(file)


def test_numbers_of_an_evaluation_are_those_of_its_rows() -> None:
    import pyarrow as pa

    rollouts = pa.table(
        {
            "experience_id": ["a", "b", "c"],
            "error": pa.array([None, None, "timeout: 5 s"]),
            "loss_mask": [[False, True], [False, True, True], [False]],
        }
    )
    scores = pa.table(
        {
            "experience_id": ["a", "b", "a"],
            "name": ["right", "right", "parsable"],
            "value": [1.0, 0.0, 1.0],
            "weight": pa.array([1.0, 1.0, None]),
            "version": pa.array([1, 1, 1], pa.int32()),
        }
    )
    found = evaluation.evaluation_numbers(rollouts, scores, name="x", solved="right")
    assert found["eval/x/rows"] == 3
    assert found["eval/x/errors"] == 1
    assert found["eval/x/solve_rate"] == 0.5
    assert found["eval/x/right_when_parsable"] == 1.0
    assert found["eval/x/response_tokens"] == 1.5
    assert json.dumps(found)
