"""The report of a run: what it says, and that the plot shows it."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inspect_sample import ROWS, metric
from rich.console import Console

from buffer_engine.errors import UsageError
from buffer_engine.schema import TABLES
from buffer_engine.store.opening import open_store
from pipelines.report import split_gain, text_report, write_reward_plot
from pipelines.reward_plot import reward_figure

share = st.floats(0, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "store"
    curation = [metric(step, f"curate/{name}", value) for step in (1, 2) for name, value in
                (("kept", 3.0), ("rejected", 1.0))]  # fmt: skip
    with open_store(folder, durability="process") as store:
        for name in ("tasks", "rollouts", "scores", "decisions", "operator_runs", "models", "metrics"):
            rows = ROWS[name] + (curation if name == "metrics" else [])
            store.append(name, pa.Table.from_pylist(rows, schema=TABLES[name].schema))
    return folder


def printed(folder: Path, run_id: str) -> str:
    sink = io.StringIO()
    Console(file=sink, width=120).print(text_report(folder, run_id))
    return sink.getvalue()


def test_the_report_tells_solve_rate_form_skill_rows_funnel_and_speed(folder: Path) -> None:
    text = printed(folder, "r1")
    assert "heldout solve rate: 0.250 before (step 0), 0.750 after (step 2), gain +0.500" in text
    # Parsable 0.5 → 1, right when parsable 0.5 → 0.75: Δp·mean r = 0.5·0.625, Δr·mean p = 0.25·0.75.
    assert "of the gain +0.500: format +0.312, skill +0.188" in text
    assert "; 2 rounds explored, 2 curation passes" in text
    # Held-out rows never train and are told apart. The store was made without batches: nothing has trained.
    assert "train rollouts 7: kept 4, rejected 2, held 1, failed 1, trained 0" in text
    assert "held-out rollouts 1: kept 1, rejected 0, held 0, failed 0\n" in text
    # All tokens over all seconds: 400 in 4 s; 40 and 180 in 10 s.
    assert "exploring: 100 sampled tokens per second" in text
    assert "training: 4 trained tokens per second (18 computed, prompts included)" in text
    assert "reward while exploring: 0.875 at step 1, 1.500 at step 2" in text
    assert [line.split() for line in text.splitlines() if line.startswith("exact_dedup")] == [
        ["exact_dedup", "6", "5", "1", "0", "0", "0", "0"]
    ]


def test_an_unknown_run_names_the_known(folder: Path) -> None:
    with pytest.raises(UsageError, match="the store has no run 'r9'; runs: r1"):
        text_report(folder, "r9")
    with pytest.raises(UsageError, match="no run 'r9'"):
        write_reward_plot(folder, "r9", folder / "never.png")


def test_the_plot_is_an_image_and_two_runs_of_it_are_equal(folder: Path, tmp_path: Path) -> None:
    write_reward_plot(folder, "r1", tmp_path / "plots" / "one.png")
    write_reward_plot(folder, "r1", tmp_path / "two.png")
    data = (tmp_path / "plots" / "one.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data == (tmp_path / "two.png").read_bytes()


def test_the_plot_hides_nothing_and_names_its_axes(folder: Path) -> None:
    figure = reward_figure(folder, "r1")
    figure.canvas.draw()
    reward, form, kept, rates = figure.axes
    assert (reward.get_ylabel(), rates.get_ylabel(), form.get_ylabel()) == ("reward", "solve rate", "share")
    # Evaluated at steps 0 and 2.
    assert list(reward.get_xticks()) == list(form.get_xticks()) == [0, 2]
    # Means 0.875 and 1.5, deviations 0.25 and none; rewards go from 0.5 to 1.5.
    band = reward.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (0.625, 1.5)
    assert kept.get_legend().get_window_extent().y0 >= kept.get_window_extent().y1
    line = reward.lines[0]
    places = reward.transData.transform(list(zip(line.get_xdata(), line.get_ydata(), strict=True)))
    for label in rates.texts:
        assert not any(label.get_window_extent().contains(*place) for place in places)


def test_the_band_ends_at_rewards_that_exist(tmp_path: Path) -> None:
    metrics = [metric(step, f"explore/reward_{name}", value) for step in (1, 2) for name, value in
               (("mean", 1.0), ("std", 2.0))]  # fmt: skip
    folder = store_of(tmp_path / "s", metrics, "tasks", "rollouts", "scores")
    band = reward_figure(folder, "r1").axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (0.5, 1.5)


def test_a_run_without_metrics_still_has_a_report_and_a_plot(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", durability="process") as store:
        store.append("models", pa.Table.from_pylist(ROWS["models"][:1], schema=TABLES["models"].schema))
        assert "run r1: 0 optimizer steps" in printed(tmp_path / "s", "r1")
        write_reward_plot(store, "r1", tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 5_000


def store_of(folder: Path, metrics: list[dict], *names: str) -> Path:
    with open_store(folder, durability="process") as store:
        for name in (*names, "metrics"):
            rows = metrics if name == "metrics" else ROWS[name]
            store.append(name, pa.Table.from_pylist(rows, schema=TABLES[name].schema))
    return folder


def test_a_run_without_a_trainer_says_its_rounds_and_a_single_reward_once(tmp_path: Path) -> None:
    names = ("tasks", "rollouts", "scores", "decisions", "operator_runs")
    text = printed(store_of(tmp_path / "s", [metric(1, "explore/reward_mean", 0.25)], *names), "r1")
    assert "run r1: 2 rounds explored, 2 curation passes; no trainer\n" in text
    assert "reward while exploring: 0.250 at step 1\n" in text
    assert "weights" not in text
    assert "optimizer" not in text
    assert "trained" not in text


def test_a_run_on_given_rows_tells_its_loss_and_no_reward(tmp_path: Path) -> None:
    metrics = [metric(1, "train/loss", 2.5), metric(2, "train/loss", 1.25), metric(1, "explore/reward_mean", 0.5)]
    folder = store_of(tmp_path / "s", metrics, "models")
    text = printed(folder, "r1")
    assert "loss: 2.500 at step 1, 1.250 at step 2\n" in text
    assert "reward" not in text
    write_reward_plot(folder, "r1", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 5_000


def test_a_gain_without_anything_parsable_before_claims_no_skill() -> None:
    split = split_gain((0.0, 0.4), (0.0, 0.8), (None, 0.5))
    assert (split.skill, split.form, split.other) == (None, pytest.approx(0.4), pytest.approx(0.0))


@given(before=st.tuples(share, share), after=st.tuples(share, share))
def test_the_parts_of_a_gain_add_up(before: tuple[float, float], after: tuple[float, float]) -> None:
    (p0, r0), (p1, r1) = before, after
    split = split_gain((p0 * r0, p1 * r1), (p0, p1), (r0, r1))
    assert split.skill is not None
    assert split.form + split.skill == pytest.approx(split.total, abs=1e-12)
    assert split.other == pytest.approx(0, abs=1e-12)
    mirrored = split_gain((p1 * r1, p0 * r0), (p1, p0), (r1, r0))
    assert mirrored.form == pytest.approx(-split.form, abs=1e-12)
