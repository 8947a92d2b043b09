"""Tables, views and queries as Parquet, JSONL and Hugging Face folders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exchange_rows import make_dialogues, make_store
from store_rows import WHEN, child_environment, rollouts

from buffer_engine.errors import ExchangeError, SchemaError, StoreError, UsageError
from buffer_engine.exchange.export import export
from buffer_engine.exchange.relations import Extraction, Selection, every_table
from buffer_engine.exchange.shapes import Shape
from buffer_engine.inspect import QueryError
from buffer_engine.schema import ROLLOUTS, TABLES
from buffer_engine.store.opening import open_store


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def store_folder(tmp_path: Path) -> Path:
    make_store(tmp_path / "store")
    return tmp_path / "store"


def test_a_table_as_parquet_has_the_rows_and_types_of_the_store(store_folder: Path, tmp_path: Path) -> None:
    with open_store(store_folder) as store, Extraction(store) as extraction:
        receipt = export(extraction, tmp_path / "rows.parquet", [Selection("rollouts", "table")], format="parquet")
        assert pq.read_table(tmp_path / "rows.parquet").equals(store.table("rollouts"))
        assert (receipt.rows, receipt.version, receipt.left_behind) == ({"rollouts": 7}, store.version(), 1)
    file = pq.ParquetFile(tmp_path / "rows.parquet")
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    assert file.schema_arrow.metadata[b"table"] == b"rollouts"
    # anybody else's reader
    assert pl.read_parquet(tmp_path / "rows.parquet").height == 7
    found = duckdb.sql(f"SELECT count(*), sum(len(token_ids)) FROM '{tmp_path / 'rows.parquet'}'").fetchall()
    assert found == [(7, 28)]


def test_all_tables_of_a_folder_are_files_of_their_own_and_attachments_come_along(
    store_folder: Path, tmp_path: Path
) -> None:
    with open_store(store_folder) as store, Extraction(store) as extraction:
        receipt = export(extraction, tmp_path / "out", every_table(), format="parquet")
        for name in TABLES:
            assert pq.read_table(tmp_path / "out" / f"{name}-00000.parquet").equals(store.table(name)), name
        [media_id] = store.table("media").column("media_id").to_pylist()
    assert (tmp_path / "out" / "media" / media_id[:2] / media_id).read_bytes() == b"picture"
    assert receipt.media == 1
    assert receipt.left_behind == 0


def test_attachments_are_listed_beside_the_rows_that_refer_to_them(store_folder: Path, tmp_path: Path) -> None:
    with open_store(store_folder) as store, Extraction(store) as extraction:
        store.put_media(b"another", "image/png")
        export(extraction, tmp_path / "out", [Selection("rollouts", "table")], format="jsonl")
    [listed] = lines(tmp_path / "out" / "media-00000.jsonl")
    assert listed["name"] == "cat.png"  # and not what no exported row refers to


def test_jsonl_keeps_lists_structs_nulls_and_times(store_folder: Path, tmp_path: Path) -> None:
    with open_store(store_folder) as store, Extraction(store) as extraction:
        export(extraction, tmp_path / "rows.jsonl", [Selection("rollouts", "table")], format="jsonl")
    row = lines(tmp_path / "rows.jsonl")[0]
    assert list(row) == ROLLOUTS.schema.names
    assert row["token_ids"] == [0, 2, 3, 4]
    assert row["logprobs"] == [None, None, -0.5, -0.25]
    assert row["messages"][1] == {  # type: ignore[index]
        "role": "assistant", "content": "ü", "tool_calls": None, "tool_call_id": None, "media": ["a", "b"],
    }  # fmt: skip
    assert row["created_at"] == WHEN.isoformat() == "2025-01-02T03:04:05.678901+00:00"
    assert "ü".encode() in (tmp_path / "rows.jsonl").read_bytes()


def test_a_condition_on_rollouts_is_about_the_experiences(tmp_path: Path) -> None:
    make_dialogues(tmp_path / "store", {0: 1.0, 1: 0.0, 2: 1.0, 3: None})
    chosen = Selection("rollouts", "table", where="reward = 1 -- solved", columns=("experience_id", "token_ids"))
    with open_store(tmp_path / "store") as store, Extraction(store) as extraction:
        export(extraction, tmp_path / "rows.jsonl", [chosen], format="jsonl")
    assert lines(tmp_path / "rows.jsonl") == [
        {"experience_id": "x0", "token_ids": [0, 2, 3, 4]},
        {"experience_id": "x2", "token_ids": [2, 2, 3, 4]},
    ]


def test_a_condition_on_another_table_is_about_its_own_columns(store_folder: Path, tmp_path: Path) -> None:
    chosen = Selection("scores", "table", where="source = 'human'")
    with open_store(store_folder) as store, Extraction(store) as extraction:
        export(extraction, tmp_path / "late.parquet", [chosen], format="parquet")
    found = pq.read_table(tmp_path / "late.parquet")
    assert found.schema.equals(TABLES["scores"].schema)
    assert found.column("comment").to_pylist() == ["late"]


def test_views_and_queries_can_be_written(store_folder: Path, tmp_path: Path) -> None:
    query = "SELECT run_id, 7::DECIMAL(5, 1) AS seven, DATE '2025-01-02' AS day, map {'a': 1} AS m FROM runs;"
    with open_store(store_folder) as store, Extraction(store) as extraction:
        export(
            extraction,
            tmp_path / "out",
            [Selection("groups", "view", where="run_id = 'run'"), Selection("mine", "query", query=query.rstrip(";"))],
            format="jsonl",
        )
    assert {row["group_id"] for row in lines(tmp_path / "out" / "groups-00000.jsonl")} == {
        "g0", "g1", "g3", "g-eval", "g-failed",
    }  # fmt: skip
    [mine] = lines(tmp_path / "out" / "mine-00000.jsonl")
    assert mine == {"run_id": "run", "seven": 7, "day": "2025-01-02", "m": {"a": 1}}


def test_an_earlier_version_can_be_exported(store_folder: Path, tmp_path: Path) -> None:
    with open_store(store_folder) as store:
        before = next(version for version, _ in store.replica().commits("rollouts"))
        with Extraction(store, until=before) as extraction:
            receipt = export(
                extraction,
                tmp_path / "a",
                [Selection("rollouts", "table"), Selection("scores", "table")],
                format="jsonl",
            )
            state = Selection("state", "query", query="SELECT DISTINCT status FROM experiences")
            export(extraction, tmp_path / "b.jsonl", [state], format="jsonl")
        assert receipt.version == before
        assert receipt.rows == {"rollouts": 6, "scores": 0}
        assert lines(tmp_path / "b.jsonl") == [{"status": "new"}]
        with pytest.raises(StoreError, match="does not exist yet"):
            Extraction(store, until=store.version() + 1)


def test_files_are_split_by_size_and_lose_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store, Extraction(store) as extraction:
        for first in range(0, 2000, 500):
            store.append("rollouts", rollouts(range(first, first + 500)))
        fresh = Extraction(store)
        for format in ("parquet", "jsonl"):
            receipt = export(
                fresh, tmp_path / format, [Selection("rollouts", "table")], format=format, file_bytes=20_000
            )
            parts = sorted((tmp_path / format).iterdir())
            assert len(parts) == receipt.files > 1
            ids = (
                [one for part in parts for one in pq.read_table(part).column("experience_id").to_pylist()]
                if format == "parquet"
                else [row["experience_id"] for part in parts for row in lines(part)]
            )
            assert ids == [f"x{number}" for number in range(2000)]
        fresh.close()
        assert extraction.version == 0


def test_small_commits_become_large_row_groups(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", durability="process") as store:
        for number in range(50):
            store.append("rollouts", rollouts([number]))
        with Extraction(store) as extraction:
            export(extraction, tmp_path / "rows.parquet", [Selection("rollouts", "table")], format="parquet")
    assert pq.ParquetFile(tmp_path / "rows.parquet").metadata.num_row_groups == 1


@pytest.mark.parametrize("format", ["parquet", "jsonl", "hf"])
def test_a_relation_without_rows_still_gets_a_file(tmp_path: Path, format: str) -> None:
    with open_store(tmp_path / "store") as store, Extraction(store) as extraction:
        export(extraction, tmp_path / "out", [Selection("scores", "table")], format=format)  # type: ignore[arg-type]
    files = [path for path in (tmp_path / "out").rglob("scores*") if path.is_file()] or list(
        (tmp_path / "out" / "data" / "scores").iterdir()
    )
    assert len(files) == 1
    if format != "jsonl":
        assert pq.read_schema(files[0]).names == TABLES["scores"].schema.names


def test_nan_is_refused_in_json_and_kept_in_parquet(store_folder: Path, tmp_path: Path) -> None:
    chosen = Selection("q", "query", query="SELECT 1 AS one, [1.0, 'nan'::DOUBLE] AS bad")
    with open_store(store_folder) as store, Extraction(store) as extraction:
        with pytest.raises(ExchangeError, match="row 0: column bad is nan, which JSON cannot say"):
            export(extraction, tmp_path / "q.jsonl", [chosen], format="jsonl")
        assert not (tmp_path / "q.jsonl").exists()
        export(extraction, tmp_path / "q.parquet", [chosen], format="parquet")


def test_nothing_is_overwritten(store_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    (tmp_path / "taken.jsonl").write_text("mine")
    with open_store(store_folder) as store, Extraction(store) as extraction:
        for name in ("taken", "taken.jsonl"):
            with pytest.raises(UsageError, match="is there already"):
                export(extraction, tmp_path / name, [Selection("scores", "table")], format="jsonl")
    assert (tmp_path / "taken" / "mine.txt").read_text() == (tmp_path / "taken.jsonl").read_text() == "mine"


def test_wrong_names_say_what_there_is(store_folder: Path, tmp_path: Path) -> None:
    with open_store(store_folder) as store, Extraction(store) as extraction:
        for selection, error, said in (
            (Selection("scores", "table", columns=("valeu",)), SchemaError, "did you mean 'value'"),
            (Selection("expereinces", "view"), UsageError, "did you mean 'experiences'"),
            (Selection("rollouts", "table", where="rewrad = 1"), QueryError, "rewrad"),
            (Selection("q", "query", query="DELETE FROM runs"), QueryError, "syntax error|refused"),
        ):
            with pytest.raises(error, match=said):
                export(extraction, tmp_path / "out", [selection], format="jsonl")
        with pytest.raises(UsageError, match="do not fit one file"):
            export(extraction, tmp_path / "a.jsonl", every_table(), format="jsonl")
    assert not (tmp_path / "out").exists()


def test_a_hugging_face_folder_keeps_the_partitions_apart(store_folder: Path, tmp_path: Path) -> None:
    with open_store(store_folder) as store, Extraction(store) as extraction:
        export(extraction, tmp_path / "out", [Selection("rollouts", "table"), Selection("runs", "view")], format="hf")
    train = pq.read_table(tmp_path / "out" / "data" / "rollouts" / "train-00000.parquet")
    held = pq.read_table(tmp_path / "out" / "data" / "rollouts" / "eval-00000.parquet")
    assert set(train.column("partition").to_pylist()) == {"train"}
    assert held.column("experience_id").to_pylist() == ["x4"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "config_name: rollouts" in card
    assert "data/rollouts/eval-00000.parquet" in card


def test_a_query_is_one_split_and_a_shape_has_its_own(store_folder: Path, tmp_path: Path) -> None:
    query = Selection("mine", "query", query="SELECT 1 AS one, NULL AS partition UNION ALL SELECT 2, 'test'")
    with open_store(store_folder) as store, Extraction(store) as extraction:
        export(extraction, tmp_path / "out", [query, Shape("sft", where="true", partition="eval")], format="hf")
    assert pq.read_table(tmp_path / "out" / "data" / "mine" / "train-00000.parquet").num_rows == 2
    assert pq.read_table(tmp_path / "out" / "data" / "sft" / "eval-00000.parquet").num_rows == 1


def test_a_map_column_is_refused_for_hugging_face(store_folder: Path, tmp_path: Path) -> None:
    with open_store(store_folder) as store, Extraction(store) as extraction:
        with pytest.raises(ExchangeError, match="column by_name is a map"):
            export(extraction, tmp_path / "out", [Selection("reward_components", "view")], format="hf")
        export(extraction, tmp_path / "rows.jsonl", [Selection("reward_components", "view")], format="jsonl")
    found = {row["experience_id"]: row["by_name"] for row in lines(tmp_path / "rows.jsonl")}
    assert found["x0"] == {"answer": 0.25}


def test_the_hugging_face_library_opens_the_folder(store_folder: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")
    with open_store(store_folder) as store, Extraction(store) as extraction:
        export(extraction, tmp_path / "out", every_table(), format="hf")
        wanted = store.table("rollouts").to_pylist()
    rows = datasets.load_dataset(str(tmp_path / "out"), "rollouts", cache_dir=str(tmp_path / "cache"))
    assert {name: split.num_rows for name, split in rows.items()} == {"train": 6, "eval": 1}
    first = rows["train"][0]
    assert first["token_ids"] == wanted[0]["token_ids"]
    assert first["logprobs"] == wanted[0]["logprobs"]
    assert first["messages"] == wanted[0]["messages"]
    assert (
        datasets.load_dataset(str(tmp_path / "out"), "scores", cache_dir=str(tmp_path / "cache"))["train"].num_rows == 5
    )


_EXPORTER = """
import sys
from pathlib import Path
from buffer_engine.exchange.export import export
from buffer_engine.exchange.relations import Extraction, Selection
from buffer_engine.store.opening import open_store
with open_store(sys.argv[1], read_only=True) as store, Extraction(store) as extraction:
    export(
        extraction, Path(sys.argv[2]), [Selection("rollouts", "table")], format="jsonl",
        advance=lambda rows: print(rows, flush=True),
    )
"""


def test_a_killed_export_leaves_nothing_at_its_place(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", durability="process") as store:
        for first in range(0, 4000, 100):
            store.append("rollouts", rollouts(range(first, first + 100)))
    child = subprocess.Popen(
        [sys.executable, "-c", _EXPORTER, str(tmp_path / "store"), str(tmp_path / "out")],
        env=child_environment(), stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not (tmp_path / "out").exists()
    with open_store(tmp_path / "store") as store, Extraction(store) as extraction:
        receipt = export(extraction, tmp_path / "out", [Selection("rollouts", "table")], format="jsonl")
    assert receipt.rows == {"rollouts": 4000}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_memory_does_not_grow_with_the_store(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", durability="process") as store:
        for first in range(0, 60_000, 4000):
            store.append("rollouts", rollouts(range(first, first + 4000)))
        before = pa.total_allocated_bytes()
        peak = [0]

        def note(rows: int) -> None:
            peak[0] = max(peak[0], pa.total_allocated_bytes() - before)

        started = time.process_time()
        with Extraction(store) as extraction:
            export(extraction, tmp_path / "out", [Selection("rollouts", "table")], format="parquet", advance=note)
        assert time.process_time() - started < 60
        assert peak[0] < store.info().bytes["rollouts"] / 2


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_dialogues(tmp_path / "runs" / "a", {0: 1.0, 1: 0.0})
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "exchange.md").read_text()
    exec(page.split("```python\n")[1].split("```")[0], {})
    assert pq.read_table("best.parquet").column("experience_id").to_pylist() == ["x0"]
    assert (tmp_path / "pairs" / "data" / "preference" / "train-00000.parquet").is_file()
