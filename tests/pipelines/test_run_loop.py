"""The loop on a tiny real model: same seed same result, the rule of continuing, parts, starving, failures as rows."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pyarrow.compute as pc
import pytest
from rich.console import Console
from tiny_run import manifest_rows, write_specification

from buffer_engine.errors import PartitionError, StarvedError, StoreBusyError, UsageError
from buffer_engine.inspect import connect_store
from buffer_engine.store import open_store
from pipelines.load import load_spec
from pipelines.runner import RunReport, resume_run, start_run


def quiet() -> Console:
    return Console(file=io.StringIO())


def run(file: Path, *overrides: str, parts: tuple[str, ...] = ("explore", "curate", "train")) -> RunReport:
    return start_run(load_spec(file, overrides=overrides), quiet(), parts=parts)  # type: ignore[arg-type]


def metric(folder: Path, name: str) -> dict[int, float]:
    with connect_store(folder) as inspection:
        rows = inspection.rows(f"SELECT step, value FROM metrics WHERE name = '{name}' ORDER BY step")
    return {row["step"]: row["value"] for row in rows}


def test_two_runs_with_one_seed_train_the_same_batches_to_the_same_weights(tmp_path: Path, tiny_model: Path) -> None:
    one = run(write_specification(tmp_path, tiny_model, steps=4, store="one"))
    two = run(write_specification(tmp_path, tiny_model, steps=4, store="two"))
    assert one.outcome.trained_steps == two.outcome.trained_steps == 4
    with open_store(one.folder) as first, open_store(two.folder) as second:
        assert manifest_rows(first.table("batch_rows")) == manifest_rows(second.table("batch_rows"))
        assert first.table("batch_rows").num_rows > 0
        tokens = [
            store.table("rollouts", columns=["experience_id", "token_ids", "logprobs"]).sort_by("experience_id")
            for store in (first, second)
        ]
        assert tokens[0].equals(tokens[1])
    weights = [report.outcome.final_weights for report in (one, two)]
    assert weights[0] is not None
    assert weights[1] is not None
    assert (weights[0] / "model.safetensors").read_bytes() == (weights[1] / "model.safetensors").read_bytes()


def test_another_seed_gives_other_rollouts(tmp_path: Path, tiny_model: Path) -> None:
    one = run(write_specification(tmp_path, tiny_model, steps=1, store="one"))
    two = run(write_specification(tmp_path, tiny_model, steps=1, store="two"), "seed=12")
    with open_store(one.folder) as first, open_store(two.folder) as second:
        assert first.table("rollouts", columns=["token_ids"]) != second.table("rollouts", columns=["token_ids"])


def test_the_held_out_solve_rate_rises_and_is_measured_first_before_training(tmp_path: Path, tiny_model: Path) -> None:
    report = run(write_specification(tmp_path, tiny_model, steps=30))
    rates = metric(report.folder, "eval/heldout/solve_rate")
    assert sorted(rates) == list(range(0, 31, 3))
    rewards = metric(report.folder, "explore/reward_mean")
    first, last = [rewards[step] for step in (1, 2, 3)], [rewards[step] for step in (28, 29, 30)]
    assert sum(last) / 3 > sum(first) / 3 + 0.2


def test_held_out_prompts_never_reach_training(tmp_path: Path, tiny_model: Path) -> None:
    report = run(write_specification(tmp_path, tiny_model, steps=2))
    with connect_store(report.folder) as inspection:
        shared = inspection.rows(
            "SELECT count(*) AS n FROM tasks a JOIN tasks b USING (prompt_hash) WHERE a.partition < b.partition"
        )
        trained = inspection.rows("SELECT DISTINCT partition FROM batch_rows JOIN rollouts USING (experience_id)")
    assert shared == [{"n": 0}]
    assert trained == [{"partition": "train"}]


def test_equal_prompts_in_both_partitions_are_refused_before_anything_is_played(
    tmp_path: Path, tiny_model: Path
) -> None:
    file = write_specification(tmp_path, tiny_model)
    file.write_text(re.sub(r", split: \{[^}]*\}", "", file.read_text()))
    with pytest.raises(PartitionError, match="eval"):
        run(file)
    with open_store(tmp_path / "store") as store:
        assert store.table("rollouts").num_rows == 0


def test_an_unfinished_run_is_continued_and_a_finished_one_is_followed_by_the_next_number(
    tmp_path: Path, tiny_model: Path
) -> None:
    file = write_specification(tmp_path, tiny_model, steps=2)
    assert run(file, parts=("explore",)).run_id == "tiny"
    second = run(file)
    assert (second.run_id, second.continued) == ("tiny", True)
    third = run(file)
    assert (third.run_id, third.continued) == ("tiny-2", False)


def test_an_unfinished_run_of_another_configuration_is_not_touched(tmp_path: Path, tiny_model: Path) -> None:
    file = write_specification(tmp_path, tiny_model, steps=2)
    run(file, parts=("explore",))
    with pytest.raises(UsageError, match="buffer-engine resume"):
        run(file, "explorer.sampling.max_tokens=4")


def test_a_second_process_with_the_same_run_is_refused_while_the_first_lives(tmp_path: Path, tiny_model: Path) -> None:
    file = write_specification(tmp_path, tiny_model, steps=1)
    with open_store(tmp_path / "store") as store, store.open_run("tiny"):
        with pytest.raises(StoreBusyError, match="tiny"):
            run(file)


def test_the_three_stages_can_be_done_one_after_the_other(tmp_path: Path, tiny_model: Path) -> None:
    file = write_specification(tmp_path, tiny_model, steps=3)
    run(file, parts=("explore",))
    with open_store(tmp_path / "store") as store:
        explored = store.table("rollouts", columns=["partition"])
        assert explored.filter(pc.field("partition") == "train").num_rows == 48
        assert store.table("decisions", columns=["operator"]).filter(pc.field("operator") == "pipeline").num_rows <= 8
    curated = run(file, parts=("curate",))
    assert curated.outcome.curated_rows == 48
    trained = run(file, parts=("train",))
    assert trained.outcome.trained_steps >= 1
    with open_store(tmp_path / "store") as store:
        assert store.verify() == []


def test_starving_stops_with_the_counts_per_operator_and_reason(tmp_path: Path, tiny_model: Path) -> None:
    file = write_specification(tmp_path, tiny_model, steps=2)
    text = file.read_text().replace("  - {id: ended", "  - {type: length_filter, unit: token, min: 50}\n  - {id: ended")
    file.write_text(text)
    with pytest.raises(StarvedError) as caught:
        run(file, "loop.on_starved=error", "loop.max_refills=1")
    # Two explorations of 4 tasks with 4 attempts each, all too short.
    assert "length_filter: too_short 32" in str(caught.value)
    assert "after 2 explorations, which made 32 rows" in str(caught.value)


def test_a_pipeline_that_takes_half_the_rows_refills_and_trains_full_batches(tmp_path: Path, tiny_model: Path) -> None:
    file = write_specification(tmp_path, tiny_model, steps=2)
    half = "{type: polars, expr: 'pl.col(\"sample_index\") < 2'}"
    text = file.read_text().replace("{type: group_reward_std, column: right, over: survivors}", half)
    file.write_text(text.replace("rows: 16,", "rows: 16, min_rows: 16,"))
    console = quiet()
    report = start_run(load_spec(file, overrides=("loop.on_starved=error", "loop.max_refills=1")), console)
    assert (report.outcome.trained_steps, report.outcome.skipped_steps) == (2, 0)
    with connect_store(report.folder) as inspection:
        batches = inspection.rows("SELECT step, rows FROM batches ORDER BY step")
        explored = inspection.rows(
            "SELECT explore_step, count(*) AS rows FROM rollouts WHERE partition = 'train' GROUP BY 1 ORDER BY 1"
        )
    assert batches == [{"step": 1, "rows": 16}, {"step": 2, "rows": 16}]
    # 16 rows an exploration, of which 8 stay: one refill makes a batch.
    assert explored == [{"explore_step": 1, "rows": 32}, {"explore_step": 2, "rows": 32}]
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 1: operators left fewer than 16 rows to train on" in said
    assert "(refill 1 of 1)" in said


def test_too_few_rows_that_nobody_rejected_are_named_as_such(tmp_path: Path, tiny_model: Path) -> None:
    file = write_specification(tmp_path, tiny_model, steps=1)
    text = file.read_text().replace("  - {type: group_reward_std, column: right, over: survivors}\n", "")
    file.write_text(text.replace("rows: 16,", "rows: 64, min_rows: 40,"))
    with pytest.raises(StarvedError) as caught:
        run(file, "loop.on_starved=error", "loop.max_refills=1")
    assert "fewer than 40 rows to train on after 2 explorations, which made 32 rows" in str(caught.value)
    assert "Rejected or held in this step: none of 32 rows" in str(caught.value)


def test_a_skipped_step_leaves_the_weights_and_counts_an_event(tmp_path: Path, tiny_model: Path) -> None:
    file = write_specification(tmp_path, tiny_model, steps=2)
    text = file.read_text().replace("  - {id: ended", "  - {type: length_filter, unit: token, min: 50}\n  - {id: ended")
    file.write_text(text)
    with pytest.raises(StarvedError, match="trained nothing"):
        run(file, "loop.max_refills=0")
    with connect_store(tmp_path / "store") as inspection:
        events = inspection.rows("SELECT step, count FROM events WHERE kind = 'starved_step' ORDER BY step")
        versions = inspection.rows("SELECT version FROM models")
    assert events == [{"step": 1, "count": 1}, {"step": 2, "count": 1}]
    assert versions == [{"version": 0}]


def test_a_prompt_longer_than_the_context_is_a_row_with_an_error_that_never_trains(
    tmp_path: Path, tiny_model: Path
) -> None:
    file = write_specification(tmp_path, tiny_model, steps=3)
    tasks = tmp_path / "tasks.jsonl"
    lines = tasks.read_text().splitlines()
    tasks.write_text("\n".join([json.dumps({"question": "x" * 300, "wanted": "a"}), *lines[:15]]) + "\n")
    report = run(file)
    with connect_store(report.folder) as inspection:
        failed = inspection.rows(
            "SELECT count(*) AS n, count(reward) AS rewarded, max(uses) AS uses FROM experiences "
            "WHERE error IS NOT NULL"
        )
        balanced = inspection.rows("SELECT count(*) AS n FROM conservation WHERE NOT balanced")
    assert failed[0]["n"] > 0
    assert failed[0]["rewarded"] == 0
    assert failed[0]["uses"] == 0
    assert balanced == [{"n": 0}]


def test_resume_says_which_runs_there_are_when_it_cannot_choose(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        resume_run(tmp_path / "nowhere", quiet())
    run(write_specification(tmp_path, tiny_model, steps=1))
    with pytest.raises(UsageError, match="no unfinished run; runs there: tiny"):
        resume_run(tmp_path / "store", quiet())


def test_the_saved_specification_is_complete_and_starts_the_same_run(tmp_path: Path, tiny_model: Path) -> None:
    file = write_specification(tmp_path, tiny_model, steps=1)
    report = run(file)
    saved = load_spec(report.folder / "specs" / "tiny.yaml")
    assert saved.spec == load_spec(file).spec
    assert saved.config_hash == load_spec(file).config_hash
