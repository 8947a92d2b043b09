"""The views over real stores: as of a version, after refresh, and while another process writes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pyarrow as pa
import pytest
from inspect_sample import ROWS, score

from buffer_engine.errors import StoreError
from buffer_engine.inspect import connect_store
from buffer_engine.schema import TABLES
from buffer_engine.store.opening import open_store

HERE = Path(__file__).parent


def fill(folder: Path) -> None:
    """Everything of the hand-made run that needs no batches."""
    with open_store(folder, durability="process") as store:
        for name in ("tasks", "rollouts", "scores", "decisions", "operator_runs", "models", "metrics", "events"):
            store.append(name, pa.Table.from_pylist(ROWS[name], schema=TABLES[name].schema))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "sample"
    fill(folder)
    return folder


def test_a_stored_run_reads_like_the_tables_it_was_made_of(folder: Path) -> None:
    with connect_store(folder) as inspection:
        rows = inspection.rows("SELECT experience_id, reward, status FROM experiences ORDER BY 1")
        assert [tuple(row.values()) for row in rows] == [
            ("a0", 1.5, "kept"),
            ("a1", 0.5, "kept"),
            ("b0", 1.0, "kept"),
            ("b1", 1.0, "rejected"),
            ("c0", None, "rejected"),
            ("c1", None, "kept"),
            ("d0", 1.5, "held"),
            ("e0", 1.0, "kept"),
        ]
        assert inspection.query("SELECT * FROM conservation WHERE NOT balanced").num_rows == 0


def test_refresh_shows_what_was_written_since_and_nothing_before(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    question = "SELECT reward FROM experiences WHERE experience_id = 'a1'"
    with open_store(tmp_path / "s", durability="process") as store, connect_store(store) as inspection:
        seen = inspection.version
        late = pa.Table.from_pylist([score("a1", "answer", 1.0, version=2)], schema=TABLES["scores"].schema)
        receipt = store.append("scores", late)
        assert inspection.rows(question) == [{"reward": 0.5}]
        assert inspection.refresh() == receipt.version
        assert inspection.rows(question) == [{"reward": 1.5}]
        with connect_store(store, until=seen) as before:
            assert before.rows(question) == [{"reward": 0.5}]
            assert before.version == seen


def test_an_earlier_version_shows_only_the_rows_of_then(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", durability="process") as store:
        store.append("tasks", pa.Table.from_pylist(ROWS["tasks"], schema=TABLES["tasks"].schema))
        rollouts = pa.Table.from_pylist(ROWS["rollouts"], schema=TABLES["rollouts"].schema)
        first = store.append("rollouts", rollouts.slice(0, 3)).version
        store.append("rollouts", rollouts.slice(3))
        with connect_store(store, until=first) as inspection:
            assert inspection.rows("SELECT count(*) AS n FROM experiences") == [{"n": 3}]
            assert inspection.query("SELECT * FROM conservation WHERE NOT balanced").num_rows == 0
        with pytest.raises(StoreError, match="version 99 does not exist yet; the newest is 3"):
            connect_store(store, until=99)


def test_no_store_is_made_where_none_is(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store here"):
        connect_store(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


WRITER = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, sys.argv[2])
    import pyarrow as pa
    from inspect_sample import ROWS, decision, operator_run, rollout, score
    from buffer_engine.schema import TABLES
    from buffer_engine.store.opening import open_store

    def table(name, rows):
        return pa.Table.from_pylist(rows, schema=TABLES[name].schema)

    with open_store(sys.argv[1], durability="process") as store:
        store.append("tasks", table("tasks", ROWS["tasks"]))
        print("ready", flush=True)
        number = 0
        while True:
            ids = [f"w{number}-{sample}" for sample in range(4)]
            made = [{**rollout("a0", f"g{number}", "t1", 0, "2", [(10, -0.5)]), "experience_id": id} for id in ids]
            store.append("rollouts", table("rollouts", made))
            store.append_all({
                "scores": table("scores", [{**score("a0", "answer", 1.0), "experience_id": id} for id in ids]),
                "decisions": table("decisions", [
                    decision(ids[0], "reject", "exact_dedup", 0, "duplicate", f"p{number}"),
                    *(decision(id, "keep", "pipeline", None, "passed", f"p{number}") for id in ids[1:]),
                ]),
                "operator_runs": table("operator_runs", [
                    operator_run(f"p{number}", 0, "exact_dedup", rows_in=4, kept=3, rejected=1),
                ]),
            })
            number += 1
    """
)


def test_the_books_balance_at_every_look_while_another_process_writes(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "live"), str(HERE)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        counts: list[int] = []
        with connect_store(tmp_path / "live") as inspection:
            deadline = time.monotonic() + 3
            while time.monotonic() < deadline and len(counts) < 15:
                inspection.refresh()
                assert inspection.rows("SELECT * FROM conservation WHERE NOT balanced") == []
                [seen] = inspection.rows(
                    "SELECT count(*) AS rows, count(*) FILTER (WHERE status <> 'new') AS judged, "
                    "count(reward) AS scored FROM experiences"
                )
                # A pass writes scores and verdicts in one transaction: no look sees one without the other.
                assert seen["judged"] == seen["scored"]
                assert seen["rows"] - seen["judged"] in (0, 4)
                counts.append(seen["rows"])
        assert len(counts) >= 5
        assert counts == sorted(counts)
        assert counts[-1] > counts[0]
    finally:
        writer.kill()
        writer.wait()
