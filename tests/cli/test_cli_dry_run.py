"""Dry runs against numbers worked out by hand, and against what `curate` then really does.

The store: two groups of two rows; the right answer is always `yes`.

    row  reply          fate under the pipeline of `write_pipeline`
    x0   Yes            mended to `yes`, kept, right
    x1   no             kept, wrong
    x2   yes and more   too long (12 characters, most 5)
    x3   (failed)       rejected by the intake
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console
from store_rows import WHEN, decisions, rollout, rollouts, score, table, task
from tiny_run import write_specification

from buffer_engine.errors import UsageError
from buffer_engine.inspect import connect_store
from buffer_engine.store import open_store
from buffer_engine.store.local import LocalStore
from pipelines.cli.main import run_command
from pipelines.load import load_spec
from pipelines.plan import build_plan
from pipelines.rehearsal import choosing
from pipelines.rehearsal.choosing import choose_rows
from pipelines.rehearsal.passes import rehearse
from pipelines.runner import start_run

Run = Callable[..., tuple[int, str, str]]

OPERATORS = """\
operators:
  - {type: replace_pattern, rules: [{pattern: 'Yes', new: 'yes'}]}
  - {type: length_filter, max: 5}
  - {id: right, type: regex_or_exact_match, gold: wanted}
trainer:
"""


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "240")

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run_command([str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return call


@pytest.fixture(autouse=True)
def model_folder(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "model").symlink_to(tiny_model)


def write_pipeline(folder: Path, operators: str = OPERATORS, *, name: str = "run", store: str = "s") -> Path:
    """The specification of `tiny_run` with other operators, and advantages without a scale."""
    file = write_specification(folder, folder / "model", name=name, store=store)
    head, _, tail = file.read_text().partition("operators:\n")
    file.write_text(head + operators + tail.partition("trainer:\n")[2])
    text = file.read_text().replace("{type: grpo}", "{type: grpo, advantage: {type: group, scale: none}}")
    file.write_text(text)
    return file


def without_trainer(file: Path) -> Path:
    """A specification that only explores and curates, so that its operators need not score."""
    file.write_text(file.read_text().partition("trainer:\n")[0])
    return file


def replied(number: int, text: str, **changes: Any) -> dict[str, Any]:
    row = rollout(number, **changes)
    row["messages"][1]["content"] = text
    return row


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The store of this module; x0 and x1 have a score of a person, all were curated once before."""
    wanted = {"info_json": json.dumps({"wanted": "yes"})}
    with open_store(tmp_path / "s", durability="process") as store:
        store.append("tasks", table("tasks", [task("t0", **wanted), task("t1", **wanted)]))
        rows = [replied(0, "Yes"), replied(1, "no"), replied(2, "yes and more"), replied(3, "", error="timeout: slow")]
        human = {"name": "human", "source": "human", "author": "ann", "weight": 0.5}
        store.append_all(
            {
                "rollouts": table("rollouts", rows),
                "scores": table("scores", [score("x0", 1.0, **human), score("x1", 0.5, **human)]),
                "decisions": decisions(range(4)),
            }
        )
    return tmp_path / "s"


def contents(folder: Path) -> dict[str, str]:
    """Digest of every file of a store; the catalog's shared-memory file is no content."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(("-shm", "-wal"))]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_dry_run_counts_rows_per_operator_and_says_why_with_examples(tmp_path: Path, folder: Path, run: Run) -> None:
    code, out, _ = run("curate", write_pipeline(tmp_path), "--dry-run", "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["rows"], found["groups"], found["available_rows"]) == (4, 2, 4)
    (pipeline,) = found["pipelines"]
    counted = {
        line["operator"]: (line["rows_in"], line["kept"], line["rejected"], line["changed"], line["mean"])
        for line in pipeline["operators"]
    }
    assert counted == {
        "intake": (4, 3, 1, 0, None),
        "replace_pattern": (3, 3, 0, 1, None),
        "length_filter": (3, 2, 1, 0, None),
        "right": (2, 2, 0, 0, 0.5),
    }
    fates = {fate["reason"]: fate for fate in pipeline["fates"]}
    assert set(fates) == {"error:timeout", "too_long"}
    (example,) = fates["too_long"]["examples"]
    assert (example["experience_id"], example["text"]) == ("x2", "yes and more")
    assert "12" in example["detail"]
    assert "5" in example["detail"]
    (change,) = [line for line in pipeline["change_examples"] if line["column"] == "response"]
    assert (change["experience_id"], change["before"], change["after"]) == ("x0", "Yes", "yes")


def test_the_effect_is_that_on_rewards_lengths_advantages_and_the_batch(tmp_path: Path, folder: Path, run: Run) -> None:
    _, out, _ = run("curate", write_pipeline(tmp_path), "--dry-run", "--json")
    effect = json.loads(out)["effect"]
    before, after = effect["before"], effect["after"]
    # Two sampled tokens and two of the prompt in each row; the failed row is not part of either side.
    assert (before["rows"], before["groups"], before["tasks"], before["trained tokens"]) == (3, 2, 2, 6)
    assert (after["rows"], after["groups"], after["tasks"], after["trained tokens"]) == (2, 1, 1, 4)
    assert (before["tokens with prompts"], after["tokens with prompts"]) == (12, 8)
    assert (before["mean length"], after["mean length"]) == (2, 2)
    # Before: what ann gave, 0.5 and 0.25. After: right 1 and 0 on top of it, 1.5 and 0.25.
    assert (before["mean reward"], before["rows without a reward"]) == (0.375, 1)
    assert (after["mean reward"], after["rows without a reward"]) == (0.875, 0)
    assert before["mean size of the advantage"] == pytest.approx(0.125)
    assert after["mean size of the advantage"] == pytest.approx(0.625)


def test_nothing_is_written(tmp_path: Path, folder: Path, run: Run) -> None:
    files = contents(folder)
    with open_store(folder, read_only=True) as store:
        version = store.version()
    other = write_pipeline(tmp_path, name="other")
    assert run("curate", write_pipeline(tmp_path), "--dry-run", "--diff", other)[0] == 0
    with open_store(folder, read_only=True) as store:
        assert store.version() == version
        assert store.verify() == []
    assert contents(folder) == files


def test_a_person_reads_counts_reasons_and_the_effect(tmp_path: Path, folder: Path, run: Run) -> None:
    code, out, _ = run("curate", write_pipeline(tmp_path), "--dry-run", "--store", folder)
    assert code == 0
    assert f"dry run over 4 rows in 2 groups of {folder}: nothing is written" in out
    assert "reject by length_filter: too_long, 1 rows" in out
    assert "x2  'yes and more'" in out
    assert "changed by replace_pattern: response, 1 rows" in out
    assert any(line.split() == ["rows", "3", "2"] for line in out.splitlines())


def test_two_pipelines_are_compared_row_by_row(tmp_path: Path, folder: Path, run: Run) -> None:
    strict = OPERATORS.replace("max: 5", "max: 2").replace("- {id: right", "- {type: truncated_mask}\n  - {id: right")
    other = write_pipeline(tmp_path, strict, name="other", store="elsewhere")
    code, out, _ = run("curate", write_pipeline(tmp_path), "--dry-run", "--diff", other, "--json")
    assert code == 0
    found = json.loads(out)
    assert [len(pipeline["operators"]) for pipeline in found["pipelines"]] == [4, 5]
    difference = found["difference"]
    # x0 `yes` has three characters; x2 is too long for both, x1 fits both, x3 failed.
    (row,) = difference["rows"]
    assert (row["experience_id"], row["first"], row["second"]) == ("x0", "kept", "reject by length_filter: too_long")
    assert difference["same_fate"] == 3
    assert difference["kept_by_both_with_another_reward"] == 0
    assert [column["rows"] for column in found["effect"].values()] == [3, 2, 1]


def test_one_value_can_be_tried_against_the_same_file(tmp_path: Path, folder: Path, run: Run) -> None:
    file = write_pipeline(tmp_path)
    code, out, _ = run("curate", file, "--set", "operators.1.max=2", "--dry-run", "--diff", file, "--json")
    assert code == 0
    found = json.loads(out)
    assert {label: column["rows"] for label, column in found["effect"].items()} == {
        "before": 3, "run-s.yaml (first)": 1, "run-s.yaml (second)": 2,
    }  # fmt: skip
    assert [row["experience_id"] for row in found["difference"]["rows"]] == ["x0"]


def test_rows_that_both_keep_with_another_reward_are_counted(tmp_path: Path, folder: Path, run: Run) -> None:
    heavier = write_pipeline(tmp_path, OPERATORS.replace("gold: wanted", "gold: wanted, weight: 2"), name="other")
    _, out, _ = run("curate", write_pipeline(tmp_path), "--dry-run", "--diff", heavier, "--json")
    difference = json.loads(out)["difference"]
    assert difference["rows"] == []
    assert difference["kept_by_both_with_another_reward"] == 1  # x0; x1 is wrong with any weight


def test_a_dry_run_says_what_curate_then_does(tmp_path: Path, tiny_model: Path, run: Run) -> None:
    file = write_specification(tmp_path, tiny_model, steps=3)
    start_run(load_spec(file), Console(file=io.StringIO()), parts=("explore",))
    _, out, _ = run("curate", file, "--dry-run", "--json")
    said = json.loads(out)
    assert run("curate", file)[0] == 0
    with connect_store(tmp_path / "store") as inspection:
        did = inspection.rows(
            "SELECT operator, sum(rows_in) AS rows_in, sum(kept) AS kept, sum(rejected) AS rejected "
            "FROM operator_runs GROUP BY operator"
        )
        reward = inspection.rows(
            "SELECT avg(reward) AS mean FROM experiences WHERE status = 'kept' AND partition = 'train'"
        )[0]["mean"]
    counts = {line["operator"]: (line["rows_in"], line["kept"], line["rejected"]) for line in did}
    assert {
        line["operator"]: (line["rows_in"], line["kept"], line["rejected"])
        for line in said["pipelines"][0]["operators"]
    } == counts
    assert counts["group_reward_std"][2] > 0
    assert said["effect"]["after"]["mean reward"] == pytest.approx(reward)
    # Once more, with all rows judged: scores of the first curation do not count twice.
    _, again, _ = run("curate", file, "--dry-run", "--json")
    assert json.loads(again)["pipelines"] == said["pipelines"]
    assert json.loads(again)["effect"]["after"] == said["effect"]["after"]


def sampling_store(folder: Path) -> LocalStore:
    """20 groups of two: t0 … t14 of task set `many`, t15 … t19 of `few`."""
    store = open_store(folder / "many", durability="process")
    tasks = [task(f"t{at}", taskset="many" if at < 15 else "few") for at in range(20)]
    store.append("tasks", table("tasks", tasks))
    store.append("rollouts", rollouts(range(40)))
    return store


def test_a_sample_takes_whole_groups_of_all_task_sets_in_proportion(tmp_path: Path) -> None:
    with sampling_store(tmp_path) as store:
        chosen = choose_rows(store, sample=17, seed=3)
        ids = [row_id for _, part in chosen.passes for row_id in part]
        numbers = sorted(int(row_id[1:]) for row_id in ids)
        assert (chosen.rows, chosen.groups, chosen.available) == (16, 8, 40)
        assert [number // 2 for number in numbers[::2]] == [number // 2 for number in numbers[1::2]]
        assert sum(number >= 30 for number in numbers) == 4  # two of eight groups, as five of twenty
        assert choose_rows(store, sample=17, seed=3) == chosen
        assert choose_rows(store, sample=17, seed=4) != chosen
        assert choose_rows(store, sample=1).rows == 2
        assert choose_rows(store, sample=40).rows == choose_rows(store).rows == 40
        with pytest.raises(UsageError, match="at least 1"):
            choose_rows(store, sample=0)


def test_later_passes_know_what_earlier_ones_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operators = "operators:\n  - {type: exact_dedup, columns: [response]}\ntrainer:\n"
    file = without_trainer(write_pipeline(tmp_path, operators))
    monkeypatch.setattr(choosing, "PASS_ROWS", 2)
    with open_store(tmp_path / "s", durability="process") as store:
        store.append("tasks", table("tasks", [task("t0"), task("t1")]))
        rows = [replied(0, "a"), replied(1, "b"), replied(2, "b"), replied(3, "c")]
        store.append("rollouts", table("rollouts", rows))
        chosen = choose_rows(store)
        assert [len(ids) for _, ids in chosen.passes] == [2, 2]
        found = rehearse(store, build_plan(load_spec(file, overrides=(f"store.path={tmp_path / 's'}",))), chosen)
    assert dict(found.rows.select("experience_id", "verdict").iter_rows()) == {
        "x0": "keep", "x1": "keep", "x2": "reject", "x3": "keep",
    }  # fmt: skip


def test_rows_that_operators_made_are_left_out_and_counted(tmp_path: Path, folder: Path, run: Run) -> None:
    with open_store(folder, durability="process") as store:
        made = rollout(4, task_id="t0", group_id="gm", group_size=1, sample_index=0, made_by="augment", parent_id="x0")
        store.append("rollouts", pa.Table.from_pylist([made], schema=rollouts([0]).schema))
    _, out, _ = run("curate", write_pipeline(tmp_path), "--dry-run")
    assert "dry run over 4 rows in 2 groups" in out
    assert "1 rows that operators made are left out" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--sample", "5"), "--sample is for dry runs: add --dry-run"),
        (("--dry-run", "--run", "rum"), "did you mean 'run'?"),
        (("--dry-run", "--sample", "0"), "at least 1"),
        (("--dry-run", "--examples", "-1"), "0 or more"),
        (("--dry-run", "--store", "nowhere"), "there is no store here"),
        (("--dry-run", "--diff", "missing.yaml"), "missing.yaml"),
    ],
)
def test_a_wrong_call_says_what_to_write(
    tmp_path: Path, folder: Path, run: Run, arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = run("curate", write_pipeline(tmp_path), *arguments)
    assert (code, out) == (2, "")
    assert said in err


def test_a_store_without_rows_says_so(tmp_path: Path, run: Run) -> None:
    open_store(tmp_path / "s", durability="process").close()
    code, _, err = run("curate", write_pipeline(tmp_path), "--dry-run")
    assert code == 2
    assert "explore or import some first" in err


def test_scores_of_earlier_curations_are_left_out_and_those_given_later_count(
    tmp_path: Path, folder: Path, run: Run
) -> None:
    file = write_pipeline(
        tmp_path, OPERATORS.replace("  - {id: right, type: regex_or_exact_match, gold: wanted}\n", "")
    )
    without_trainer(file)
    operator_run = {
        "pass_id": "p1", "run_id": "run", "position": 0, "operator": "old", "type": "ended", "fingerprint": "f",
        "rows_in": 4, "kept": 4, "rejected": 0, "held": 0, "masked": 0, "added": 0, "scored": 4, "nulls": 0,
        "errors": 0, "cpu_seconds": 0.0, "wall_seconds": 0.0, "created_at": WHEN,
    }  # fmt: skip
    with open_store(folder, durability="process") as store:
        old = [score(f"x{at}", 8.0, name="old", author="old") for at in range(2)]
        again = [score(f"x{at}", 16.0, name="again", author="ended@1f") for at in range(2)]
        store.append_all(
            {"scores": table("scores", [*old, *again]), "operator_runs": table("operator_runs", [operator_run])}
        )
    _, out, _ = run("curate", file, "--dry-run", "--json")
    effect = json.loads(out)["effect"]
    # Ann gave 0.5 and 0.25; `old` is of a pipeline that is not this one.
    assert effect["before"]["mean reward"] == 0.375 + 8 + 16
    assert effect["after"]["mean reward"] == 0.375 + 16


def test_masked_and_held_rows_are_counted_with_their_reasons(tmp_path: Path, folder: Path, run: Run) -> None:
    operators = "operators:\n  - {type: group_complete, verdict: hold}\n  - {type: truncated_mask}\ntrainer:\n"
    with open_store(folder, durability="process") as store:
        store.append("tasks", table("tasks", [task("t2")]))
        store.append("rollouts", table("rollouts", [replied(4, "a", truncated=True), replied(5, "b")]))
    _, out, _ = run("curate", without_trainer(write_pipeline(tmp_path, operators)), "--dry-run", "--json")
    found = json.loads(out)
    assert "mean size of the advantage" not in found["effect"]["after"]
    counted = {
        line["operator"]: (line["held"], line["masked"], line["kept"]) for line in found["pipelines"][0]["operators"]
    }
    assert counted == {"intake": (0, 0, 5), "group_complete": (1, 0, 4), "truncated_mask": (0, 1, 4)}
    assert {(fate["verdict"], fate["reason"]) for fate in found["pipelines"][0]["fates"]} == {
        ("reject", "error:timeout"), ("hold", "incomplete"), ("mask", "truncated"),
    }  # fmt: skip
    # x4 keeps its place in the batch and trains on neither of its two tokens.
    assert (found["effect"]["after"]["rows"], found["effect"]["after"]["trained tokens"]) == (4, 6)
