"""Scoring stored rows again with an operator: versions, conditions, interruptions, and training on the result."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from store_rows import child_environment, rollout, score, table, task
from tiny_run import write_specification

from buffer_engine.errors import UsageError
from buffer_engine.inspect import connect_store
from buffer_engine.scoring import add_scores
from buffer_engine.store import open_store
from pipelines.cli.main import run_command
from pipelines.load import load_spec
from pipelines.rescoring.operator_file import compile_scoring, read_operators
from pipelines.rescoring.rescore import Rescored, author_of, rescore
from pipelines.rescoring.selecting import component_scores, select_rows
from pipelines.runner import start_run

import pyarrow as pa  # isort: skip

Run = Callable[..., tuple[int, str, str]]

EXACT = "{type: regex_or_exact_match, id: answer, gold: wanted}\n"


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "240")

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run_command([str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return call


def replied(number: int, text: str, **changes: Any) -> dict[str, Any]:
    row = rollout(number, **changes)
    row["messages"][1]["content"] = text
    return row


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """x0 … x7 in groups of two: even ones reply `yes`, odd ones `no`; x7 failed. All were scored 1 with weight 0.5."""
    wanted = json.dumps({"wanted": "yes"})
    with open_store(tmp_path / "s", durability="process") as store:
        store.append("tasks", table("tasks", [task(f"t{at}", info_json=wanted) for at in range(4)]))
        rows = [replied(at, "no" if at % 2 else "yes", error="timeout: slow" if at == 7 else None) for at in range(8)]
        scores = [score(f"x{at}", 1.0, weight=0.5) for at in range(8)]
        store.append_all({"rollouts": table("rollouts", rows), "scores": table("scores", scores)})
    return tmp_path / "s"


@pytest.fixture
def operator(tmp_path: Path) -> Path:
    file = tmp_path / "operator.yaml"
    file.write_text(EXACT)
    return file


def new_scores(folder: Path, name: str = "answer") -> dict[str, tuple[int, float | None, float | None]]:
    """row → (version, value, weight) of what operators wrote after the first scores."""
    with open_store(folder, read_only=True) as store:
        rows = store.table("scores").to_pylist()
    found = [row for row in rows if row["name"] == name and "@" in row["author"]]
    assert len({row["experience_id"] for row in found}) == len(found)
    assert {row["source"] for row in found} <= {"operator"}
    return {row["experience_id"]: (row["version"], row["value"], row["weight"]) for row in found}


def version(folder: Path) -> int:
    with open_store(folder, read_only=True) as store:
        return store.version()


def test_every_row_gets_the_next_version_with_the_weight_it_had(folder: Path, operator: Path, run: Run) -> None:
    code, out, _ = run("score", folder, "--with", operator)
    assert code == 0
    assert "7 rows scored (answer, weight 0.5, by regex_or_exact_match@" in out
    assert "1 rows are failed rollouts" in out
    assert new_scores(folder) == {f"x{at}": (2, 1.0 - at % 2, 0.5) for at in range(7)}
    with connect_store(folder) as inspection:
        rewards = inspection.rows("SELECT experience_id AS id, reward FROM experiences WHERE error IS NULL ORDER BY 1")
    assert [row["reward"] for row in rewards] == [0.5, 0, 0.5, 0, 0.5, 0, 0.5]


def test_the_same_again_writes_nothing_and_another_operator_the_next_version(
    folder: Path, operator: Path, run: Run
) -> None:
    assert run("score", folder, "--with", operator)[0] == 0
    before = version(folder)
    code, out, _ = run("score", folder, "--with", operator)
    assert code == 0
    assert "0 rows scored" in out
    assert "7 rows had this operator's score already" in out
    assert version(folder) == before
    operator.write_text(EXACT.replace("gold: wanted", "gold: wanted, mode: contains, weight: 2"))
    assert run("score", folder, "--with", operator)[0] == 0
    with open_store(folder, read_only=True) as store:
        rows = [row for row in store.table("scores").to_pylist() if row["version"] == 3]
    assert {row["weight"] for row in rows} == {2.0}
    assert len(rows) == 7


def test_a_condition_chooses_rows_and_a_name_the_component_and_version(folder: Path, operator: Path, run: Run) -> None:
    code, out, _ = run("score", folder, "--with", operator, "--where", "task_id = 't1'", "--name", "checked@v3")
    assert code == 0
    assert "2 rows scored (checked, weight 1," in out
    assert new_scores(folder) == {}
    assert new_scores(folder, "checked") == {"x2": (3, 1.0, 1.0), "x3": (3, 0.0, 1.0)}


def test_a_version_that_is_taken_is_named_with_its_rows_and_nothing_is_written(
    folder: Path, operator: Path, run: Run
) -> None:
    with open_store(folder, durability="process") as store:
        add_scores(store, pa.table({"experience_id": ["x4"], "value": [0.5]}), name="answer", author="ann")
    before = version(folder)
    code, _, err = run("score", folder, "--with", operator, "--name", "answer@v2")
    assert code == 2
    assert "answer@v2: taken on x4 (version 2 of answer by ann); nothing was written. Write @v3" in err
    assert version(folder) == before
    assert run("score", folder, "--with", operator, "--name", "answer@v3")[0] == 0
    assert {row[0] for row in new_scores(folder).values()} == {3}
    code, _, err = run("score", folder, "--with", operator, "--name", "answer@v4")
    assert code == 2
    assert "7 rows have this operator's score as another version, for example x0 as version 3" in err


def test_a_dry_run_shows_the_values_before_and_after_and_writes_nothing(folder: Path, operator: Path, run: Run) -> None:
    before = version(folder)
    code, out, _ = run("score", folder, "--with", operator, "--dry-run")
    assert code == 0
    assert "7 rows would be scored; nothing is written" in out
    lines = {
        words[0]: words[1:] for words in map(str.split, out.splitlines()) if words and words[0] in ("before", "after")
    }
    assert lines["before"][:3] == ["7", "0", "1"]
    assert lines["after"][:3] == ["7", "0", "0.571429"]
    assert "3 of the 7 rows that had a score get another value" in out
    assert version(folder) == before
    assert new_scores(folder) == {}


def test_a_killed_scoring_keeps_whole_parts_and_the_same_command_does_the_rest(
    folder: Path, operator: Path, run: Run
) -> None:
    script = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        import pipelines.cli.rescore as verb
        real = verb.rescore
        def until_killed(*arguments, **options):
            done = []
            def advance(rows):
                done.append(rows)
                if len(done) == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options | {"advance": advance})
        verb.rescore = until_killed
        verb.score_with(Path(sys.argv[1]), Path(sys.argv[2]), verb.RescoreOptions(chunk_rows=2))
        """
    )
    killed = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(operator)], env=child_environment(), check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert sorted(new_scores(folder)) == ["x0", "x1", "x2", "x3"]
    code, out, _ = run("score", folder, "--with", operator, "--chunk-rows", "2")
    assert code == 0
    assert "3 rows scored" in out
    assert "4 rows had this operator's score already" in out
    assert new_scores(folder) == {f"x{at}": (2, 1.0 - at % 2, 0.5) for at in range(7)}


def test_rows_on_which_the_operator_fails_are_named_and_tried_again(folder: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "half_broken.py").write_text(
        "def judge(row):\n"
        "    if row['response'] == 'no':\n"
        "        raise ValueError('cannot read no')\n"
        "    return 0.25\n"
    )
    operator = tmp_path / "python.yaml"
    operator.write_text(
        "{type: python_row, id: answer, function: 'half_broken:judge', columns: [response], use: score, weight: 1}\n"
    )
    env = child_environment()
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    command = [sys.executable, "-m", "pipelines.cli.main", "score", str(folder), "--with", str(operator)]
    for _ in range(2):
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "3 rows failed and have no new score" in done.stdout
        assert "cannot read no" in done.stdout
        assert sorted(new_scores(folder)) == ["x0", "x2", "x4", "x6"]


def test_group_operators_see_whole_groups_and_only_missing_rows_are_written(
    folder: Path, tmp_path: Path, run: Run
) -> None:
    operator = tmp_path / "group.yaml"
    operator.write_text("{type: reward_normalize, id: relative, column: answer, method: leave_one_out, weight: 0}\n")
    with open_store(folder, durability="process") as store:
        add_scores(store, pa.table({"experience_id": ["x0"], "value": [3.0]}), name="answer", author="ann")
    assert run("score", folder, "--with", operator, "--where", "experience_id = 'x0'")[0] == 0
    assert run("score", folder, "--with", operator, "--where", "task_id = 't0'")[0] == 0
    found = new_scores(folder, "relative")
    assert found["x1"] == (1, -2.0, None)  # 1 - 3: x0 is in its baseline, although it was scored before


def test_an_operator_that_compares_all_rows_needs_them_in_one_part(folder: Path, tmp_path: Path, run: Run) -> None:
    operator = tmp_path / "batch.yaml"
    operator.write_text("{type: reward_normalize, id: relative, column: answer, by: batch, method: rank, weight: 0}\n")
    code, _, err = run("score", folder, "--with", operator, "--chunk-rows", "4")
    assert code == 2
    assert "operator 'relative' compares all rows with each other, and 7 are more than the 4 of one part" in err
    assert run("score", folder, "--with", operator, "--chunk-rows", "7")[0] == 0
    assert len(new_scores(folder, "relative")) == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{type: length_filter, max: 3}\n", "drops rows, and scoring again judges none"),
        ("{type: regex_or_exact_match, gold: wnated}\n", "did you mean 'wanted'?"),
        ("{type: regex_or_exact_match, gold: wanted,\n gild: 3}\n", "operator.yaml:2: gild: unknown key"),
        ("operators:\n  - {type: strip_markup}\n", "0 of the operators score (none)"),
        ("operators: []\n", "there is no operator in it"),
    ],
)
def test_a_file_that_cannot_score_is_refused(folder: Path, operator: Path, run: Run, text: str, said: str) -> None:
    operator.write_text(text)
    code, out, err = run("score", folder, "--with", operator)
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--from FILE, or --with OPERATOR.yaml"),
        (("--where", "true", "--from", "x.csv"), "--where is for --with"),
        (("--with", "operator.yaml", "--where", "nothing = 1"), "--where 'nothing = 1'"),
        (("--with", "operator.yaml", "--where", "false"), "no row meets --where 'false'"),
        (("--with", "operator.yaml", "--name", "right@2"), "write NAME or NAME@v2"),
        (("--with", "operator.yaml", "--weight", "2"), "--weight is for --from"),
        (("--with", "operator.yaml", "--chunk-rows", "0"), "at least 1"),
    ],
)
def test_a_wrong_call_says_what_to_write(
    folder: Path, operator: Path, run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(operator.parent)
    code, out, err = run("score", folder, *arguments)
    assert (code, out) == (2, "")
    assert said in err


def test_the_shipped_example_is_a_score_operator_of_the_demo() -> None:
    examples = Path(__file__).parents[2] / "pipelines" / "examples"
    (config,) = read_operators(examples / "operators" / "rescore_correct.yaml")
    assert config.name in [step.name for step in load_spec(examples / "demo.yaml").spec.operators]  # type: ignore[attr-defined]


def test_a_training_run_uses_the_new_version_at_once(tmp_path: Path, tiny_model: Path, run: Run) -> None:
    file = write_specification(tmp_path, tiny_model, steps=1)
    text = file.read_text().replace("  - {type: group_reward_std, column: right, over: survivors}\n", "")
    file.write_text(text)
    for part in ("explore", "curate"):
        start_run(load_spec(file), Console(file=io.StringIO()), parts=(part,))  # type: ignore[arg-type]
    operator = tmp_path / "longer.yaml"
    operator.write_text(
        "{type: polars, id: right, expr: 'pl.col(\"sample_index\").cast(pl.Float64)', use: score, weight: 1}\n"
    )
    store = tmp_path / "store"
    assert run("score", store, "--with", operator, "--name", "right@v2", "--where", "partition = 'train'")[0] == 0
    report = start_run(load_spec(file), Console(file=io.StringIO()), parts=("train",))
    assert report.outcome.trained_steps == 1
    with connect_store(store) as inspection:
        rows = inspection.rows(
            "SELECT b.reward, b.score_versions_json AS versions, r.sample_index FROM batch_rows b "
            "JOIN rollouts r USING (experience_id)"
        )
    assert len(rows) == 16
    assert {row["versions"] for row in rows} == {'{"right": 2}'}
    assert all(row["reward"] == row["sample_index"] for row in rows)


@pytest.mark.parametrize("version", [None, 2])
def test_a_score_that_somebody_gives_in_the_meantime_is_never_overwritten(
    folder: Path, operator: Path, version: int | None
) -> None:
    with open_store(folder, durability="process") as store:
        kinds = store.table("scores", columns=["name", "weight"])
        with compile_scoring(operator, read_operators(operator), store.table("tasks"), kinds) as plan:
            selection = select_rows(
                store, where=None, scores=component_scores(store, plan), component="answer",
                author=author_of(plan), version=version,
            )  # fmt: skip

            def ann_scores_x4(rows: int) -> None:
                add_scores(store, pa.table({"experience_id": ["x4"], "value": [0.75]}), name="answer", author="ann")

            def go() -> Rescored:
                return rescore(store, plan, selection, weight=0.5, version=version, chunk_rows=4, advance=ann_scores_x4)

            if version is None:
                assert go().scored == 7
            else:
                with pytest.raises(UsageError, match="answer@v2 was given to a row of this part by somebody else"):
                    go()
    found = new_scores(folder)
    # The first part, x0 to x3, was written before; ann's version 2 of x4 stays either way.
    assert {row_id: found[row_id][0] for row_id in ("x0", "x1", "x2", "x3")} == dict.fromkeys(
        ("x0", "x1", "x2", "x3"), 2
    )
    assert found.get("x4", (None,))[0] == (3 if version is None else None)
