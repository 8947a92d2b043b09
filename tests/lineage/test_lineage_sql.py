"""Several stores and earlier versions in one question; their runs and rows have the same ids on purpose."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from store_rows import decisions, manifest, model, rollouts, score, table, task

from buffer_engine.errors import StoreError
from buffer_engine.inspect import QueryError, StoreAt, connect_stores, named_queries, views
from buffer_engine.scoring import add_scores
from buffer_engine.store import open_store
from buffer_engine.store.base import ReadPolicy
from pipelines.cli.main import run_command

Ask = Callable[..., tuple[int, list[list[str]], str]]


def build(folder: Path, values: list[float], *, trains: bool) -> Path:
    """Run `run` with rows x0 … in groups of two, all kept; `trains`: the first group was trained at step 1."""
    with open_store(folder, durability="process") as store:
        store.append("tasks", table("tasks", [task(f"t{group}") for group in range(len(values) // 2)]))
        store.append("rollouts", rollouts(range(len(values))))
        store.append("scores", table("scores", [score(f"x{at}", value) for at, value in enumerate(values)]))
        store.append("decisions", decisions(range(len(values))))
        if trains:
            reservation = store.reserve(ReadPolicy(rows=2), run_id="run", batch_id="run/1", model_version=0)
            assert reservation is not None
            batch, rows = manifest("run/1", 1, reservation.experience_ids)
            store.prepare_batch(reservation, step=1, batch=batch, rows=rows)
            store.commit_batch("run/1", step=1, model=model(1))
    return folder


@pytest.fixture
def stores(tmp_path: Path) -> tuple[Path, Path]:
    """`a`: four rows with rewards 1, 0, 0, 0, the first two trained; `b`: two rows with rewards 1, 1."""
    one = build(tmp_path / "a", [1.0, 0.0, 0.0, 0.0], trains=True)
    return one, build(tmp_path / "b", [1.0, 1.0], trains=False)


@pytest.fixture
def ask(capfd: pytest.CaptureFixture[str]) -> Ask:
    """`buffer-engine sql`, as CSV: exit code, lines without the header, and what was said."""

    def call(*arguments: str | Path) -> tuple[int, list[list[str]], str]:
        capfd.readouterr()
        code = run_command(["sql", *(str(argument) for argument in arguments), "--format", "csv"])
        out, err = capfd.readouterr()
        return code, list(csv.reader(io.StringIO(out)))[1:], err

    return call


def test_stores_are_told_apart_by_a_column_even_where_every_id_repeats(
    stores: tuple[Path, Path], ask: Ask, capfd: pytest.CaptureFixture[str]
) -> None:
    code, rows, _ = ask(
        *stores, "SELECT store, run_id, count(*), avg(reward), sum(uses) FROM experiences GROUP BY ALL ORDER BY 1"
    )
    assert (code, rows) == (0, [["a", "run", "4", "0.25", "2"], ["b", "run", "2", "1.0", "0"]])
    side_by_side = (
        "SELECT experience_id, one.reward, two.reward, one.fate, two.fate FROM experiences one "
        "JOIN experiences two USING (experience_id) WHERE one.store = 'a' AND two.store = 'b' ORDER BY 1"
    )
    assert ask(*stores, side_by_side)[1] == [
        ["x0", "1.0", "1.0", "trained", "kept"],
        ["x1", "0.0", "1.0", "trained", "kept"],
    ]
    capfd.readouterr()
    run_command(["sql", *map(str, stores), side_by_side, "--format", "json"])
    assert json.loads(capfd.readouterr().out)[1] == {
        "experience_id": "x1", "reward": 0.0, "reward_1": 1.0, "fate": "trained", "fate_1": "kept",
    }  # fmt: skip
    assert ask(*stores, "SELECT store, steps, rollouts FROM runs ORDER BY 1")[1] == [["a", "1", "4"], ["b", "0", "2"]]
    assert ask(*stores, "SELECT store, count(*) FROM raw.scores GROUP BY 1 ORDER BY 1")[1] == [["a", "4"], ["b", "2"]]
    assert ask(*stores, "FROM conservation WHERE NOT balanced")[1] == []


def test_every_view_and_named_query_works_over_several_stores_and_begins_with_the_store(
    stores: tuple[Path, Path],
) -> None:
    with connect_stores({"it's a": StoreAt(stores[0]), "b": StoreAt(stores[1])}) as inspection:
        for view in views():
            assert inspection.columns(view)[0] == ("store", "VARCHAR")
            inspection.query(f'SELECT * FROM "{view}"')
        for name in named_queries():
            assert inspection.named(name).column_names[0] == "store"
        assert inspection.rows("SELECT DISTINCT store FROM runs ORDER BY 1") == [{"store": "b"}, {"store": "it's a"}]


def test_a_named_query_is_asked_of_each_store(stores: tuple[Path, Path], ask: Ask) -> None:
    code, rows, _ = ask(*stores, "--name", "dead_groups")
    assert code == 0
    # In a the second group is all 0, in b the only one all 1.
    assert sorted(row[0] for row in rows) == ["a", "b"]
    assert ask(stores[0], "--name", "dead_groups")[1] == [row[1:] for row in rows if row[0] == "a"]


def test_one_store_has_no_such_column(stores: tuple[Path, Path], ask: Ask) -> None:
    code, _, err = ask(stores[0], "SELECT store FROM runs")
    assert (code, '"store" not found' in err) == (2, True)


def test_a_store_can_be_compared_with_itself_at_an_earlier_version(stores: tuple[Path, Path], ask: Ask) -> None:
    folder = stores[0]
    with open_store(folder, durability="process") as store:
        before = store.version()
        add_scores(store, pa.table({"experience_id": ["x3"], "value": [1.0]}), name="answer", author="ann")
    question = "SELECT store, avg(reward) FROM experiences GROUP BY 1 ORDER BY 1"
    assert ask(folder, f"{folder}@{before}", question)[1] == [["a", "0.5"], [f"a@{before}", "0.25"]]
    average = "SELECT avg(reward) FROM experiences"
    assert ask(f"{folder}@{before}", average)[1] == ask(folder, average, "--as-of", before)[1] == [["0.25"]]
    assert ask(folder, average, "--until", before)[1] == [["0.25"]]
    # Version 5 is the reservation, 6 its manifest, 7 the commit.
    state = "SELECT DISTINCT status, uses, trained_step, fate FROM experiences WHERE group_id = 'g0'"
    found = {version: ask(folder, state, "--as-of", version)[1] for version in (3, 4, 5, 6, 7)}
    assert found == {
        3: [["new", "0", "", "new"]],
        4: [["kept", "0", "", "kept"]],
        5: [["kept", "0", "", "reserved"]],
        6: [["kept", "0", "", "reserved"]],
        7: [["kept", "1", "1", "trained"]],
    }


def test_refresh_moves_every_store_but_those_held_at_a_version(stores: tuple[Path, Path]) -> None:
    folder = stores[1]
    with open_store(folder, durability="process") as store:
        held = {"now": StoreAt(store), "then": StoreAt(folder, store.version())}
        with connect_stores(held) as inspection:
            before = dict(inspection.versions)
            add_scores(store, pa.table({"experience_id": ["x0"], "value": [0.0]}), name="answer", author="ann")
            question = "SELECT store, reward FROM experiences WHERE experience_id = 'x0' ORDER BY 1"
            assert [row["reward"] for row in inspection.rows(question)] == [1.0, 1.0]
            inspection.refresh()
            assert [row["reward"] for row in inspection.rows(question)] == [0.0, 1.0]
            assert inspection.versions == {"now": before["now"] + 1, "then": before["then"]}
        # A store that was handed over stays open.
        assert store.version() == before["now"] + 1


def test_equal_folder_names_are_told_apart_by_their_paths(
    tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    for parent in ("one", "two"):
        (tmp_path / parent).mkdir()
        build(tmp_path / parent / "s", [1.0, 0.0], trains=False)
    monkeypatch.chdir(tmp_path)
    assert ask("one/s", "two/s", "SELECT store FROM runs ORDER BY 1")[1] == [["one/s"], ["two/s"]]


def test_wrong_questions_about_several_stores_are_told_plainly(
    stores: tuple[Path, Path], tmp_path: Path, ask: Ask
) -> None:
    one, two = stores
    for arguments, said in (
        ((one, two, "SELECT 1", "--as-of", "3"), "write STORE@VERSION for each"),
        ((one, one, "SELECT 1"), f"{one} is named twice"),
        ((one, tmp_path / "none", "SELECT 1"), "there is no store here"),
        ((one, two, "SELECT 1", "--name", "errors"), "either a query or --name"),
        ((f"{one}@3", "SELECT 1", "--as-of", "2"), "either --as-of 2 or @3"),
        ((one, two, "DELETE FROM runs"), "DELETE is refused"),
        ((one, two, "FROM run"), "did you mean 'runs'?"),
        ((one, two), "what should be asked?"),
    ):
        code, rows, err = ask(*arguments)
        assert (code, rows) == (2, []), arguments
        assert said in err, (arguments, err)
    code, _, err = ask(one, f"{two}@99", "SELECT 1")
    assert (code, "version 99 does not exist yet" in err) == (1, True)
    with pytest.raises(QueryError, match="at least one store"):
        connect_stores({})
    with pytest.raises(StoreError, match="no store here"):
        connect_stores({"a": StoreAt(one), "c": StoreAt(tmp_path / "none")})
