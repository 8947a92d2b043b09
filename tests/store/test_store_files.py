"""The files on disk, read without this package."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from store_rows import rollouts

from buffer_engine.schema import TABLES
from buffer_engine.store import LocalStore, open_store
from buffer_engine.store.catalog import Catalog
from buffer_engine.store.files import LocalFiles
from buffer_engine.store.layout import StoreLayout
from buffer_engine.store.media import LocalMediaFiles
from buffer_engine.store.parts import Parts


def segment_of(store: LocalStore, table: str) -> Path:
    (found,) = (store.path / "segments" / table).iterdir()
    return found


def test_a_segment_is_an_arrow_stream_that_pyarrow_and_polars_open(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        for number in range(3):
            store.append("rollouts", rollouts([2 * number, 2 * number + 1]))
        path = segment_of(store, "rollouts")
        # space is allocated ahead: most of the file is zeros, which end the stream
        assert path.read_bytes()[-1024:] == bytes(1024)
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
            assert stream.schema.equals(TABLES["rollouts"].schema, check_metadata=True)
            assert stream.read_all().to_pylist() == rollouts(range(6)).to_pylist()
        assert pl.read_ipc_stream(path)["experience_id"].to_list() == [f"x{number}" for number in range(6)]


def test_the_catalog_and_a_few_lines_find_every_acknowledged_row(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.append("rollouts", rollouts([0, 1]))
    with open_store(tmp_path / "s") as store:
        store.append("rollouts", rollouts([2]))
        store.compact(everything=True)
        store.append("rollouts", rollouts([3]))
    code = (Path(__file__).parents[2] / "docs" / "store.md").read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {"folder": str(tmp_path / "s")}
    exec(code, names)
    rows = names["rows"]
    assert isinstance(rows, pa.Table)
    assert rows.column("experience_id").to_pylist() == ["x0", "x1", "x2", "x3"]


def test_every_process_writes_files_of_its_own(tmp_path: Path) -> None:
    for number in range(2):
        with open_store(tmp_path / "s") as store:
            store.append("rollouts", rollouts([number]))
    assert len(list((tmp_path / "s" / "segments" / "rollouts").iterdir())) == 2


def test_a_segment_is_rolled_at_its_size_and_rows_stay_readable(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path / "s")
    layout.segments.mkdir(parents=True)
    catalog = Catalog(layout, durability="process", read_only=False)
    parts = Parts(layout, catalog, LocalFiles(layout), LocalMediaFiles(layout.root))
    with LocalStore(parts, durability="process", segment_bytes=40_000) as store:
        for number in range(12):
            store.append("rollouts", rollouts([number]))
        with sqlite3.connect(layout.catalog) as connection:
            ends = dict(connection.execute("SELECT segment_id, max(offset + length) FROM frames GROUP BY 1").fetchall())
        assert len(ends) >= 2
        assert max(ends.values()) <= 40_000
        assert store.table("rollouts", columns=["experience_id"]).column(0).to_pylist() == [f"x{n}" for n in range(12)]
        assert store.verify() == []


def test_a_frame_without_catalog_entry_is_invisible(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.append("rollouts", rollouts([0]))
        path = segment_of(store, "rollouts")
        with sqlite3.connect(store.path / "catalog.sqlite") as connection:
            (end,) = connection.execute("SELECT max(offset + length) FROM frames").fetchone()
        handle = os.open(path, os.O_RDWR)
        os.pwrite(handle, rollouts([1]).to_batches()[0].serialize().to_pybytes(), end)
        os.close(handle)
        assert store.table("rollouts").num_rows == 1
    with open_store(tmp_path / "s") as store:
        store.append("rollouts", rollouts([2]))
        assert store.table("rollouts", columns=["experience_id"]).column(0).to_pylist() == ["x0", "x2"]
        assert store.verify() == []


@pytest.mark.parametrize(("durability", "least"), [("power", 1), ("process", 0)])
def test_durability_power_syncs_the_frames_before_the_catalog_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str, least: int
) -> None:
    synced: list[int] = []
    real = os.fdatasync
    with open_store(tmp_path / "s", durability=durability) as store:  # pyright: ignore[reportArgumentType]
        store.append("rollouts", rollouts([0]))

        def recording(handle: int) -> None:
            synced.append(store.version())
            real(handle)

        monkeypatch.setattr(os, "fdatasync", recording)
        store.append("rollouts", rollouts([1]))
        assert synced == [1] * least  # version 2 did not exist yet
