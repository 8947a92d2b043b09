"""The shipped specifications on the real model, shortened: what the README promises is true."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from buffer_engine.inspect import connect_store
from pipelines.load import load_spec
from pipelines.runner import RunReport, start_run

EXAMPLES = Path(__file__).parents[2] / "pipelines" / "examples"


def run_example(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> RunReport:
    monkeypatch.chdir(EXAMPLES.parents[1])
    loaded = load_spec(EXAMPLES / name, overrides=(f"store.path={folder}", *overrides))
    return start_run(loaded, Console(file=io.StringIO()))


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_learns_on_held_out_prompts_within_eight_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run_example(
        "demo.yaml",
        tmp_path / "demo",
        monkeypatch,
        "loop.steps=8",
        "loop.evaluate.every_steps=8",
        "trainer.checkpoint.every_steps=8",
        "report.plot=null",
    )
    assert report.outcome.trained_steps == 8
    with connect_store(report.folder) as inspection:
        rates = {
            row["step"]: row["value"]
            for row in inspection.rows("SELECT step, value FROM metrics WHERE name = 'eval/heldout/solve_rate'")
        }
        overlap = inspection.rows(
            "SELECT count(*) AS n FROM tasks a JOIN tasks b USING (prompt_hash) WHERE a.partition < b.partition"
        )
        assert inspection.rows("SELECT count(*) AS n FROM conservation WHERE NOT balanced") == [{"n": 0}]
        deviation = inspection.rows("SELECT max(value) AS most FROM metrics WHERE name = 'train/ratio_deviation'")
    assert overlap == [{"n": 0}]
    assert sorted(rates) == [0, 8]
    assert rates[8] - rates[0] >= 0.25
    # The explorer samples with the very weights that train, both in float32.
    assert deviation[0]["most"] < 1e-3


@pytest.mark.slow
@pytest.mark.model
def test_the_offline_example_cleans_filters_and_fine_tunes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_example("offline_sft.yaml", tmp_path / "offline", monkeypatch)
    with connect_store(report.folder) as inspection:
        drops = inspection.rows("SELECT operator, reason, count(*) AS n FROM drops GROUP BY ALL ORDER BY ALL")
        losses = inspection.rows("SELECT value FROM metrics WHERE name = 'train/loss' ORDER BY step")
        assert inspection.rows("SELECT count(*) AS n FROM conservation WHERE NOT balanced") == [{"n": 0}]
    # The file holds 46 dialogues: two exact repeats, two dirty ones, one of one word, one far too long.
    assert drops == [
        {"operator": "exact_dedup", "reason": "duplicate", "n": 2},
        {"operator": "length_filter", "reason": "too_long", "n": 1},
        {"operator": "length_filter", "reason": "too_short", "n": 1},
        {"operator": "normalize_text", "reason": "replaced", "n": 2},
    ]
    assert losses[-1]["value"] < 0.8 * losses[0]["value"]


@pytest.mark.slow
@pytest.mark.model
def test_the_dataset_example_plays_and_curates_real_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_example(
        "champ_curation.yaml",
        tmp_path / "champ",
        monkeypatch,
        "loop.steps=1",
        "explorer.tasks_per_step=4",
        "explorer.sampling.max_tokens=48",
    )
    with connect_store(report.folder) as inspection:
        rows = inspection.rows("SELECT count(*) AS n, count(DISTINCT task_id) AS tasks FROM experiences")
        funnel = {row["operator"]: row for row in inspection.rows("SELECT * FROM funnel")}
        assert inspection.rows("SELECT count(*) AS n FROM conservation WHERE NOT balanced") == [{"n": 0}]
    assert rows == [{"n": 8, "tasks": 4}]
    assert funnel["intake"]["rows_in"] == 8
    # Nothing but the length filter stands before the verifier, and it rejects no reply of eight tokens or more.
    assert funnel["correct"]["scored"] + funnel["correct"]["nulls"] == funnel["correct"]["rows_in"]
