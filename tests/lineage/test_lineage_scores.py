"""Late scores: versions continue, repeats change nothing, and one wrong row keeps all others out."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_rows import child_environment, decisions, manifest, model, rollouts, score, table, task

from buffer_engine.errors import SchemaError
from buffer_engine.inspect import connect_store
from buffer_engine.scoring import add_scores
from buffer_engine.store import open_store
from buffer_engine.store.base import ReadPolicy
from pipelines.cli.main import run_command

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "240")

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run_command([str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rows x0 … x3, all kept, with `answer` = 1 (weight 1); x0 and x1 were trained at step 1."""
    with open_store(tmp_path / "s", durability="process") as store:
        store.append("tasks", table("tasks", [task("t0"), task("t1")]))
        store.append_all(
            {
                "rollouts": rollouts(range(4)),
                "scores": table("scores", [score(f"x{number}") for number in range(4)]),
                "decisions": decisions(range(4)),
            }
        )
        reservation = store.reserve(ReadPolicy(rows=2), run_id="run", batch_id="run/1", model_version=0)
        assert reservation is not None
        batch, rows = manifest("run/1", 1, reservation.experience_ids)
        store.prepare_batch(reservation, step=1, batch=batch, rows=rows)
        store.commit_batch("run/1", step=1, model=model(1))
    return tmp_path / "s"


def given(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows))


def log(folder: Path) -> list[tuple[Any, ...]]:
    with open_store(folder, read_only=True) as store:
        rows = store.table("scores").to_pylist()
    columns = ("experience_id", "name", "version", "value", "weight", "source", "author", "comment")
    return sorted(tuple(row[name] for name in columns) for row in rows if row["author"] != "answer")


def test_a_score_continues_the_versions_and_keeps_the_weight_of_its_component(folder: Path) -> None:
    with open_store(folder, durability="process") as store:
        before = store.version()
        receipt = add_scores(
            store, given({"experience_id": "x0", "value": 0.25}, {"experience_id": "x3", "value": None}),
            name="answer", author="ann",
        )  # fmt: skip
        assert (receipt.added, receipt.unchanged, receipt.superseding, receipt.metrics) == (2, 0, 2, 0)
        assert receipt.version == before + 1
    assert log(folder) == [
        ("x0", "answer", 2, 0.25, 1.0, "human", "ann", None),
        ("x3", "answer", 2, None, 1.0, "human", "ann", None),
    ]
    with connect_store(folder) as inspection:
        rewards = inspection.rows("SELECT experience_id, reward FROM experiences ORDER BY 1")
        # The batch keeps the reward that it used.
        used = inspection.rows("SELECT reward FROM batch_rows WHERE experience_id = 'x0'")
    assert [row["reward"] for row in rewards] == [0.25, 1.0, 1.0, None]
    assert used == [{"reward": 1.0}]


def test_a_new_component_is_a_metric_until_it_is_given_a_weight(folder: Path) -> None:
    rows = given({"experience_id": "x0", "value": 3.0, "comment": "well put"})
    with open_store(folder, durability="process") as store:
        receipt = add_scores(store, rows, name="tone", author="ann")
        assert (receipt.added, receipt.metrics) == (1, 1)
        receipt = add_scores(store, rows, name="tone", author="ann", weight=0.5)
        assert (receipt.added, receipt.superseding, receipt.metrics) == (1, 1, 0)
    assert log(folder) == [
        ("x0", "tone", 1, 3.0, None, "human", "ann", "well put"),
        ("x0", "tone", 2, 3.0, 0.5, "human", "ann", "well put"),
    ]
    with connect_store(folder) as inspection:
        assert inspection.rows("SELECT reward FROM rewards WHERE experience_id = 'x0'") == [{"reward": 1.0 + 0.5 * 3}]


def test_the_same_scores_again_change_nothing_and_others_do(folder: Path) -> None:
    first = given(
        {"experience_id": "x0", "value": 0.0, "author": "ann"},
        {"experience_id": "x0", "value": 1.0, "author": "bob"},
        {"experience_id": "x1", "value": 0.5, "author": "ann"},
    )
    with open_store(folder, durability="process") as store:
        assert add_scores(store, first, name="tone").added == 3
        version = store.version()
        again = add_scores(store, first, name="tone")
        assert (again.added, again.unchanged, again.version) == (0, 3, version)
        assert store.version() == version
        other = given({"experience_id": "x1", "value": 0.5, "author": "ann", "comment": "now with a reason"})
        assert add_scores(store, other, name="tone").added == 1
        assert add_scores(store, first.slice(0, 0), name="tone").added == 0
        # The earlier table is an opinion again: what it says of x1 is not the newest any more.
        assert (add_scores(store, first, name="tone").added) == 1
    assert [row[:4] for row in log(folder)] == [
        ("x0", "tone", 1, 0.0), ("x0", "tone", 2, 1.0),
        ("x1", "tone", 1, 0.5), ("x1", "tone", 2, 0.5), ("x1", "tone", 3, 0.5),
    ]  # fmt: skip


def test_every_wrong_row_is_told_and_none_is_written(folder: Path) -> None:
    wrong = given(
        {"experience_id": "x0", "value": float("nan"), "source": "human"},
        {"experience_id": None, "value": 1.0, "source": "humans"},
        {"experience_id": "x1", "value": float("-inf"), "source": None},
        {"experience_id": "x2", "value": 1.0, "source": "api"},
    )
    with open_store(folder, durability="process") as store:
        version = store.version()
        with pytest.raises(SchemaError) as caught:
            add_scores(store, wrong, name="tone", author="ann")
        for part in (
            "4 problems in 4 scores, so none was written",
            "row 0: value is nan; it must be finite",
            "row 1: experience_id is missing",
            "row 1: source is 'humans': did you mean 'human'?",
            "row 2: value is -inf",
        ):
            assert part in str(caught.value), part
        many = given(*({"experience_id": f"y{number}", "value": 1.0} for number in range(25)))
        with pytest.raises(SchemaError, match="25 problems") as caught:
            add_scores(store, many, name="tone", author="ann")
        assert "row 19: no rollout 'y19' in the store" in str(caught.value)
        assert "… and 5 more" in str(caught.value)
        with pytest.raises(SchemaError, match="unknown column 'score'"):
            add_scores(store, given({"experience_id": "x0", "score": 1.0}), name="tone", author="ann")
        with pytest.raises(SchemaError, match="no column author, and no author is given"):
            add_scores(store, given({"experience_id": "x0", "value": 1.0}), name="tone")
        assert store.version() == version
    assert log(folder) == []


def test_scoring_reads_no_byte_of_the_scored_sequences(folder: Path) -> None:
    """So its cost cannot depend on their length: it works with the rollouts' files taken away."""
    shutil.rmtree(folder / "segments" / "rollouts")
    with open_store(folder, durability="process") as store:
        assert add_scores(store, given({"experience_id": "x0", "value": 0.5}), name="answer", author="ann").added == 1
        assert store.narrow("scores", ["x0"]).column("version").to_pylist() == [1, 2]


SCORER = textwrap.dedent(
    """
    import sys
    import pyarrow as pa
    from buffer_engine.scoring import add_scores
    from buffer_engine.store import open_store

    with open_store(sys.argv[1], durability="process") as store:
        sys.stdin.readline()
        for number in range(15):
            rows = pa.table({"experience_id": ["x0", "x1"], "value": [float(number)] * 2})
            add_scores(store, rows, name="answer", author=sys.argv[2])
    """
)


def test_two_people_who_score_one_row_at_once_lose_nothing(folder: Path) -> None:
    people = [
        subprocess.Popen(
            [sys.executable, "-c", SCORER, str(folder), name], stdin=subprocess.PIPE, env=child_environment()
        )
        for name in ("ann", "bob")
    ]
    for person in people:
        assert person.stdin is not None
        person.stdin.write(b"go\n")
        person.stdin.close()
    assert [person.wait(timeout=60) for person in people] == [0, 0]
    rows = log(folder)
    for row in ("x0", "x1"):
        assert [entry[2] for entry in rows if entry[0] == row] == list(range(2, 32))
        for name in ("ann", "bob"):
            values = [entry[3] for entry in rows if entry[0] == row and entry[6] == name]
            assert values == [float(number) for number in range(15)]


def write(file: Path, kind: str) -> Path:
    rows = [
        {"experience_id": "x0", "name": "tone", "value": 0.5, "author": "ann", "comment": 'said "well",\nand more'},
        {"experience_id": "x1", "name": "tone", "value": None, "author": "ann", "comment": None},
    ]
    if kind == "csv":
        file.write_text(
            'experience_id,name,value,author,comment\nx0,tone,0.5,ann,"said ""well"",\nand more"\nx1,tone,,ann,\n'
        )
    elif kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    return file


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_file_of_each_kind_gives_the_same_scores_once(run: Run, folder: Path, tmp_path: Path, kind: str) -> None:
    file = write(tmp_path / f"late.{kind}", kind)
    code, out, err = run("score", folder, "--from", file)
    assert (code, "2 scores added (0 in place of earlier ones), 0 already there" in out) == (0, True)
    assert "2 of them have no weight" in err
    assert log(folder) == [
        ("x0", "tone", 1, 0.5, None, "human", "ann", 'said "well",\nand more'),
        ("x1", "tone", 1, None, None, "human", "ann", None),
    ]
    code, out, _ = run("score", folder, "--from", file)
    assert (code, "0 scores added (0 in place of earlier ones), 2 already there" in out) == (0, True)
    assert len(log(folder)) == 2


@pytest.mark.parametrize(
    ("text", "said", "expected"),
    [
        ("experience_id,value\nx0,1\nx1,nan\n", "late.csv, line 3: value is nan; it must be finite", 1),
        ("experience_id,value\nx0,1\nx9,1\nx8,1\n", "line 4: no rollout 'x8' in the store", 1),
        ("experience_id,value\nx0,1\nx1,one\n", "late.csv, line 3: value is 'one'; it must be a number", 2),
        ("experience_id,value\nx0,1,2\n", "line 2: it has another number of cells than the header", 2),
        ("experience_id,valu\nx0,1\n", "unknown column 'valu': did you mean 'value'?", 2),
        ('experience_id,value,comment\nx0,1,"a\nb"\nx1,nan,\n', "late.csv, line 4: value is nan", 1),
        ("", "there are no scores in it", 2),
    ],
)
def test_a_wrong_file_is_told_with_its_line(
    run: Run, folder: Path, tmp_path: Path, text: str, said: str, expected: int
) -> None:
    (tmp_path / "late.csv").write_text(text)
    code, out, err = run("score", folder, "--from", tmp_path / "late.csv", "--name", "tone", "--author", "ann")
    assert (code, out) == (expected, "")
    assert said in err
    assert log(folder) == []


def test_what_the_command_line_lacks_is_said(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "late.csv").write_text("experience_id,value\nx0,1\n")
    code, _, err = run("score", folder, "--from", tmp_path / "late.csv", "--name", "tone")
    assert (code, "no column author; add one, or say --author" in err) == (2, True)
    code, _, err = run("score", folder, "--from", tmp_path / "late.xlsx", "--name", "tone")
    assert (code, "known: .csv, .jsonl, .parquet" in err) == (2, True)
    code, _, err = run("score", tmp_path / "none", "--from", tmp_path / "late.csv")
    assert (code, "there is no store here" in err) == (2, True)


def test_the_life_of_a_row_tells_which_scores_came_after_its_training(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "late.csv").write_text("experience_id,value,comment\nx0,0,wrong after all\nx2,0,\n")
    assert run("score", folder, "--from", tmp_path / "late.csv", "--name", "answer", "--author", "ann")[0] == 0
    out = run("explain", folder, "--row", "x0")[1]
    assert "scored answer = 0 (weight 1) by human ann, version 2, after step 1: wrong after all" in out
    assert out.index("trained at step 1") < out.index("after step 1: wrong after all")
    assert "after step" not in run("explain", folder, "--row", "x2")[1]
