"""Runs that record their steps token by token: what is stored, with the step and through a crash."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tiny_run import write_specification

from buffer_engine.inspect import connect_store
from buffer_engine.store import open_store
from pipelines.load import load_spec
from pipelines.runner import RunReport, resume_run, start_run
from trainers.torch_trainer import TorchTrainer


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


def run(file: Path) -> RunReport:
    overrides = ("trainer.token_stats.every_steps=2", "trainer.entropy=true")
    return start_run(load_spec(file, overrides=overrides), Console(file=io.StringIO()))


def stats(store: Path) -> list[dict[str, object]]:
    with open_store(store) as opened:
        table = opened.table("token_stats").drop_columns(["recorded_at"])
    return table.sort_by([("batch_id", "ascending"), ("experience_id", "ascending")]).to_pylist()


def test_every_second_step_is_stored_with_the_rows_of_its_batch(tmp_path: Path, tiny_model: Path) -> None:
    store = run(write_specification(tmp_path, tiny_model, steps=4)).folder
    with connect_store(store) as inspection:
        counts = inspection.rows(
            "SELECT stats.step, count(*) = any_value(batches.rows) AS all_rows, "
            "sum(list_sum(stats.trained::INT[])) = any_value(batches.trained_tokens) AS all_tokens, "
            "bool_and(len(stats.trained) = len(rollouts.token_ids)) AS aligned "
            "FROM token_stats AS stats JOIN batches USING (batch_id) JOIN rollouts USING (experience_id) "
            "GROUP BY stats.step ORDER BY 1"
        )
        # On-policy and in one precision, trainer and sampler agree about every token.
        [worst] = inspection.rows("SELECT max(abs(list_max(ratios) - 1)) AS ratio FROM token_stats WHERE step = 2")
    assert counts == [{"step": step, "all_rows": True, "all_tokens": True, "aligned": True} for step in (2, 4)]
    assert worst["ratio"] < 1e-3
    with open_store(store) as opened:
        assert opened.verify() == []


def test_a_run_that_dies_after_a_recorded_step_stores_it_once_and_as_the_undisturbed_one(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = run(write_specification(tmp_path, tiny_model, steps=5, store="calm")).folder
    real = TorchTrainer.train_step
    calls = 0

    def dying(self: TorchTrainer, batch: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Killed
        return real(self, batch)  # type: ignore[arg-type]

    file = write_specification(tmp_path, tiny_model, steps=5)
    with monkeypatch.context() as patch:
        patch.setattr(TorchTrainer, "train_step", dying)
        with pytest.raises(Killed):
            run(file)
    before = stats(tmp_path / "store")
    # No checkpoint was saved yet: the resumed run trains steps 1 and 2 again.
    report = resume_run(tmp_path / "store", Console(file=io.StringIO()))
    assert report.outcome.replayed_steps == 3
    after = stats(tmp_path / "store")
    assert {row["step"] for row in before} == {2}
    assert [row for row in after if row["step"] == 2] == before
    assert after == stats(calm)
