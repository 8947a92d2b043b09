"""What-if answers against numbers worked out by hand.

The store: one group of four rows, each with two sampled tokens, and advantage = reward − mean of the group.

    row  right (weight 1)  style (weight 0.5)  reward  fate
    x0   1                 1                   1.5     trained
    x1   0                 1                   0.5     trained
    x2   0                 0                   0       trained, masked by `cut`
    x3   1                 0                   1       rejected by `dedup`

The batch x0, x1, x2 has mean 2/3. After it was trained, ann scored x1 `right` = 1 and could not score x2; `cut` then
masked x1 and `dedup` rejected x0.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from store_rows import decision, decisions, model, rollouts, score, table, task
from tiny_run import write_specification

from buffer_engine.errors import UsageError
from buffer_engine.scoring import add_scores
from buffer_engine.store import open_store
from buffer_engine.store.base import ReadPolicy
from pipelines.batches import build_manifest
from pipelines.cli.main import run_command
from pipelines.lineage.changes import parse_changes
from pipelines.lineage.finding import find_batch
from pipelines.lineage.what_if import WhatIf, what_if
from pipelines.load import load_spec, resolved_yaml
from pipelines.runs import save_specification
from trainers.algorithms.grpo import GRPO
from trainers.base import TrainBatch

import pyarrow as pa  # isort: skip

RIGHT = (1.0, 0.0, 0.0, 1.0)
STYLE = (1.0, 1.0, 0.0, 0.0)
THIRD = 1 / 3


def build(folder: Path, *settings: str, later: bool = True) -> Path:
    """The store of this module; `settings` change the run's specification."""
    file = write_specification(folder, folder / "model", name="run", store="s")
    loaded = load_spec(file, overrides=settings)
    trainer = loaded.spec.trainer
    assert trainer is not None
    with open_store(folder / "s", durability="process") as store:
        save_specification(folder / "s", "run", resolved_yaml(loaded.spec), loaded.config_hash)
        store.append("tasks", table("tasks", [task("t0")]))
        scores = [score(f"x{at}", value, name="right", author="right") for at, value in enumerate(RIGHT)]
        scores += [score(f"x{at}", value, name="style", author="style", weight=0.5) for at, value in enumerate(STYLE)]
        scores += [score(f"x{at}", 1.0, name="ended", author="ended", weight=None) for at in range(4)]
        store.append_all(
            {
                "rollouts": rollouts(range(4), group_size=4),
                "scores": table("scores", scores),
                "decisions": table(
                    "decisions",
                    [
                        decision("x3", "reject", operator="dedup", reason="duplicate"),
                        decision("x2", "mask", operator="cut"),
                        *(decision(f"x{at}") for at in range(3)),
                    ],
                ),
            }
        )
        policy = ReadPolicy(rows=8)
        reservation = store.reserve(policy, run_id="run", batch_id="run/1", model_version=0)
        assert reservation is not None
        written = build_manifest(
            store, reservation, step=1, algorithm=GRPO(trainer.algorithm), policy=policy,  # type: ignore[attr-defined]
            config_hash=loaded.config_hash, seed=0,
        )  # fmt: skip
        store.prepare_batch(reservation, step=1, batch=written.batch, rows=written.rows)
        store.commit_batch("run/1", step=1, model=model(1))
        if later:
            rows = pa.table({"experience_id": ["x1", "x2"], "value": [1.0, None]})
            add_scores(store, rows, name="right", author="ann")
            store.append("decisions", decisions([1], "mask", operator="cut", pass_id="p2"))
            store.append("decisions", decisions([0], "reject", operator="dedup", pass_id="p2"))
    return folder / "s"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("whatif"), "trainer.algorithm.advantage={type: group, scale: none}")


def ask(folder: Path, *, without: str | None = None, scores: tuple[str, ...] = (), weights: tuple[str, ...] = ()):
    changes = parse_changes(without=without, scores=scores, weights=weights)
    with open_store(folder, read_only=True) as store:
        return what_if(store, find_batch(store, step=1), changes)


def column(answer: WhatIf, name: str) -> dict[str, object]:
    return dict(zip(answer.rows["experience_id"].to_list(), answer.rows[name].to_list(), strict=True))


def summary(answer: WhatIf) -> dict[str, tuple[float | None, float | None]]:
    return {name: (before, after) for name, before, after in answer.summary}


def test_no_change_gives_the_manifest_whatever_was_scored_and_decided_since(folder: Path) -> None:
    answer = ask(folder)
    assert column(answer, "change") == dict.fromkeys(("x0", "x1", "x2"), "stays")
    assert column(answer, "reward_before") == {"x0": 1.5, "x1": 0.5, "x2": 0.0}
    assert column(answer, "reward_after") == column(answer, "reward_before")
    before = {"x0": 1.5 - 2 * THIRD, "x1": 0.5 - 2 * THIRD, "x2": -2 * THIRD}
    assert column(answer, "advantage_before") == pytest.approx(before)
    assert column(answer, "advantage_after") == column(answer, "advantage_before")
    assert column(answer, "tokens_before") == column(answer, "tokens_after") == {"x0": 2, "x1": 2, "x2": 0}
    assert all(before in (None, after) for name, (before, after) in summary(answer).items())
    assert summary(answer)["rows whose advantage changes"] == (None, 0)
    assert answer.notes == []


def test_without_an_operator_the_rows_it_rejected_come_back_and_move_the_baseline(folder: Path) -> None:
    answer = ask(folder, without="dedup")
    assert column(answer, "change") == {"x0": "stays", "x1": "stays", "x2": "stays", "x3": "enters"}
    assert column(answer, "reason")["x3"] == "rejected by dedup: duplicate"
    # Rewards 1.5, 0.5, 0, 1: mean 0.75.
    assert column(answer, "advantage_after") == {"x0": 0.75, "x1": -0.25, "x2": -0.75, "x3": 0.25}
    assert column(answer, "advantage_before")["x3"] is None
    found = summary(answer)
    assert found["rows"] == (3, 4)
    assert found["trained tokens"] == (4, 6)
    assert found["mean reward"] == (pytest.approx(2 * THIRD), 0.75)
    assert found["mean size of the advantage"] == (pytest.approx((5 / 6 + 1 / 6 + 2 / 3) / 3), 0.5)
    assert found["rows whose advantage changes"] == (None, 3)
    assert answer.notes == ["operators after dedup have not judged the rows that enter; they might reject some"]


def test_without_a_masking_operator_its_rows_train_and_nothing_else_changes(folder: Path) -> None:
    answer = ask(folder, without="cut")
    assert summary(answer)["trained tokens"] == (4, 6)
    assert column(answer, "tokens_after")["x2"] == 2
    assert column(answer, "advantage_after") == column(answer, "advantage_before")


def test_without_a_score_operator_its_component_counts_no_more(folder: Path) -> None:
    for answer in (ask(folder, without="style"), ask(folder, weights=("style=0",))):
        assert column(answer, "reward_after") == {"x0": 1.0, "x1": 0.0, "x2": 0.0}
        expected = {"x0": 2 * THIRD, "x1": -THIRD, "x2": -THIRD}
        assert column(answer, "advantage_after") == pytest.approx(expected)


def test_another_weight_gives_other_rewards(folder: Path) -> None:
    answer = ask(folder, weights=("style=-1", "ended=0.25"))
    # right − style + 0.25: 0.25, −0.75, 0.25; mean −1/12
    assert column(answer, "reward_after") == {"x0": 0.25, "x1": -0.75, "x2": 0.25}
    assert column(answer, "advantage_after") == pytest.approx({"x0": THIRD, "x1": -2 * THIRD, "x2": THIRD})
    assert summary(answer)["rows whose advantage changes its sign"] == (None, 1)


def test_a_later_version_of_a_score_is_used_where_a_row_has_it(folder: Path) -> None:
    for wanted in ("right@v2", "right@latest"):
        answer = ask(folder, scores=(wanted,))
        # x1 is right now; x2 has no reward any more and cannot train: 1.5 and 1.5 differ in nothing.
        assert column(answer, "change") == {"x0": "stays", "x1": "stays", "x2": "leaves"}
        assert column(answer, "reason")["x2"] == "no reward"
        assert column(answer, "reward_after") == {"x0": 1.5, "x1": 1.5, "x2": None}
        assert column(answer, "advantage_after") == {"x0": 0.0, "x1": 0.0, "x2": None}
        assert summary(answer)["rows in groups without a difference"] == (0, 2)
    first = ask(folder, scores=("right@v1",))
    assert column(first, "advantage_after") == column(first, "advantage_before")


def test_a_component_can_be_an_expression_over_the_row(folder: Path) -> None:
    answer = ask(folder, scores=("right=1 - right",))
    # 0.5, 1.5, 1: mean 1
    assert column(answer, "advantage_after") == {"x0": -0.5, "x1": 0.5, "x2": 0.0}
    answer = ask(folder, scores=("length=token_count",), weights=("length=0.125",))
    assert column(answer, "reward_after") == {"x0": 1.75, "x1": 0.75, "x2": 0.25}
    assert column(answer, "advantage_after") == pytest.approx(column(answer, "advantage_before"))


def test_advantages_are_those_of_the_run_s_algorithm(tmp_path: Path) -> None:
    """Without style the rewards are 1, 0, 0: sample deviation √(1/3); leave-one-out baselines 0, 1/2, 1/2."""
    for name in ("std", "rloo"):
        (tmp_path / name).mkdir()
    scaled = ask(build(tmp_path / "std", "trainer.algorithm.advantage={type: group, epsilon: 0}"), without="style")
    root = 3**0.5
    expected = {"x0": 2 * THIRD * root, "x1": -THIRD * root, "x2": -THIRD * root}
    assert column(scaled, "advantage_after") == pytest.approx(expected)
    settings = "trainer.algorithm.advantage={type: rloo}"
    rloo = ask(build(tmp_path / "rloo", settings), without="style")
    assert column(rloo, "advantage_after") == {"x0": 1.0, "x1": -0.5, "x2": -0.5}


def test_every_step_of_a_real_run_is_found_again_when_nothing_is_changed(
    trained: tuple[Path, dict[int, TrainBatch]],
) -> None:
    folder, captured = trained
    with open_store(folder, read_only=True) as store:
        for step in captured:
            found = find_batch(store, step=step, run_id="tiny")
            answer = what_if(store, found, parse_changes(without=None, scores=(), weights=()))
            assert answer.rows["experience_id"].to_list() == found.rows.column("experience_id").to_pylist()
            assert answer.rows["reward_after"].to_list() == found.rows.column("reward").to_pylist()
            assert answer.rows["advantage_after"].to_list() == found.rows.column("advantage").to_pylist()
            late = what_if(store, found, parse_changes(without=None, scores=("right@latest",), weights=()))
            # everybody's late score is the same: nothing to learn
            assert set(late.rows["reward_after"].to_list()) == {0.125}
            assert set(late.rows["advantage_after"].to_list()) == {0.0}


def test_the_command_prints_both_sides_and_writes_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert run_command(["what-if", str(folder), "--batch", "1", "--without", "dedup", "--weight", "style=0"]) == 0
    out = capfd.readouterr().out
    [row] = [line.split() for line in out.splitlines() if line.lstrip().startswith("x3")]
    # right only: 1, 0, 0, 1; mean 0.5
    assert row[:7] == ["x3", "g0", "enters", "null", "1", "null", "0.5"]
    assert "3 → 4" in out
    assert "note: operators after dedup" in out
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path in files}
    assert after == files


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "what should be different?"),
        (("--without", "dedupe"), "the run has no such operator: did you mean 'dedup'?"),
        (("--score", "rihgt@v1"), "no row of the batch has this component: did you mean 'right'?"),
        (("--score", "right@v3"), "the batch's rows have versions 1 to 2 of it"),
        (("--score", "right"), "write NAME@v2, NAME@latest or NAME=EXPRESSION"),
        (("--score", "right=wrong + 1"), "unknown column 'wrong'"),
        (("--score", "right=avg(right)"), "AVG looks at other rows"),
        (("--score", "right=right / 0"), "it is inf for row x0"),
        (("--score", "length=token_count"), "the component is new, so say its share with --weight length=1"),
        (("--weight", "style"), "write NAME=NUMBER"),
        (("--weight", "style=nan"), "write NAME=NUMBER, a finite one"),
        (("--weight", "stile=1"), "did you mean 'style'?"),
        (("--without", "dedup", "--run", "other"), "no batch of run 'other' has step 1; there are run: steps 1 to 1"),
    ],
)
def test_a_question_that_has_no_answer_says_why(
    folder: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert run_command(["what-if", str(folder), "--batch", "1", *arguments]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert said in captured.err


def test_a_group_that_was_rejected_whole_is_told_of(tmp_path: Path) -> None:
    """A second group lost all of its rows to `dedup` in the same pass: it would have had a batch of its own."""
    folder = build(tmp_path, later=False)
    with open_store(folder, durability="process") as store:
        store.append("tasks", table("tasks", [task("t1")]))
        store.append_all(
            {
                "rollouts": rollouts(range(4, 8), group_size=4),
                "decisions": table("decisions", [decision(f"x{at}", "reject", operator="dedup") for at in range(4, 8)]),
            }
        )
    note = ask(folder, without="dedup").notes[-1]
    assert "dedup also rejected whole groups in the passes that this batch came from: 1, with 4 rows" in note


def test_a_specification_that_is_not_that_of_the_batch_is_refused(tmp_path: Path) -> None:
    folder = build(tmp_path, later=False)
    file = folder / "specs" / "run.yaml"
    changed = file.read_text().replace("seed: 11", "seed: 12")
    assert changed != file.read_text()
    file.write_text(changed)
    with pytest.raises(UsageError, match="changed since the batch was made"):
        ask(folder, without="dedup")
    file.unlink()
    with pytest.raises(UsageError, match=r"specification of batch run/1 .* is not there"):
        ask(folder, without="dedup")
    # A run that was resumed with another configuration keeps the older one beside it.
    loaded = load_spec(write_specification(tmp_path, tmp_path / "model", name="run", store="s"))
    save_specification(folder, "run", resolved_yaml(loaded.spec), loaded.config_hash)
    other = load_spec(tmp_path / "run-s.yaml", overrides=("seed=99",))
    save_specification(folder, "run", resolved_yaml(other.spec), other.config_hash)
    assert column(ask(folder, without="dedup"), "change")["x3"] == "enters"
