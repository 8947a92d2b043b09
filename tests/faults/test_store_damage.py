"""Damage is found, named, and kept to the rows it touches."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from store_rows import decisions, manifest, rollouts, score, table

from buffer_engine.errors import CorruptSegmentError, DamagedRowsWarning
from buffer_engine.store import open_store
from buffer_engine.store.base import ReadPolicy

FRAMES = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four frames of two rollouts each, one batch committed, scores in one frame."""
    with open_store(tmp_path / "s", durability="process") as store:
        for number in range(FRAMES):
            numbers = [2 * number, 2 * number + 1]
            store.append_all({"rollouts": rollouts(numbers), "decisions": decisions(numbers)})
        store.append("scores", table("scores", [score(f"x{number}") for number in range(4)]))
        found = store.reserve(ReadPolicy(rows=2), run_id="run", batch_id="b1", model_version=0)
        assert found is not None
        batch, rows = manifest("b1", 1, found.experience_ids)
        store.prepare_batch(found, step=1, batch=batch, rows=rows)
        store.commit_batch("b1", step=1)
        assert store.verify() == []
    return tmp_path / "s"


def frames(folder: Path, name: str) -> list[tuple[Path, int, int]]:
    with sqlite3.connect(folder / "catalog.sqlite") as connection:
        found = connection.execute(
            "SELECT name, offset, length FROM frames JOIN segments USING (segment_id) WHERE frames.tbl = ? "
            "ORDER BY frame_id", (name,)
        ).fetchall()  # fmt: skip
    connection.close()
    return [(folder / "segments" / segment, offset, length) for segment, offset, length in found]


def flip(path: Path, at: int) -> None:
    handle = os.open(path, os.O_RDWR)
    (byte,) = os.pread(handle, 1, at)
    os.pwrite(handle, bytes([byte ^ 0x10]), at)
    os.close(handle)


@pytest.mark.parametrize("where", [0.0, 0.1, 0.5, 0.999])
def test_a_flipped_byte_is_reported_and_only_its_rows_are_lost(folder: Path, where: float) -> None:
    path, offset, length = frames(folder, "rollouts")[1]
    flip(path, offset + int(where * length))
    with open_store(folder) as store:
        findings = store.verify()
        assert [finding.kind for finding in findings] == ["checksum"]
        assert findings[0].where == f"segments/rollouts/{path.name}@{offset}"
        assert "2 rows of rollouts are damaged" in findings[0].message
        good = ["x0", "x1", "x4", "x5", "x6", "x7"]
        assert store.fetch(good, columns=["experience_id"]).column(0).to_pylist() == good
        with (
            pytest.raises(CorruptSegmentError, match=f"'x3' .*{path.name}: frame at offset {offset}, length {length}"),
            pytest.warns(DamagedRowsWarning, match="2 rows of rollouts are left out"),
        ):
            store.fetch(["x0", "x3"])
        scanned = store.scan("rollouts", columns=["experience_id"])
        assert [one for batch in scanned for one in batch.column(0).to_pylist()] == good
        store.append("rollouts", rollouts([100]))  # and the store goes on


def test_a_flipped_byte_after_the_last_frame_harms_nobody(folder: Path) -> None:
    path, offset, length = frames(folder, "rollouts")[-1]
    flip(path, offset + length + 100)
    with open_store(folder) as store:
        assert store.verify() == []
        assert store.table("rollouts").num_rows == 8


def test_a_damaged_schema_message_is_reported_for_every_frame_behind_it(folder: Path) -> None:
    path, _, _ = frames(folder, "scores")[0]
    flip(path, 3)
    with open_store(folder) as store:
        assert [finding.kind for finding in store.verify()] == ["checksum"]
        assert store.table("rollouts").num_rows == 8
        with pytest.warns(DamagedRowsWarning, match="schema at the start"):
            assert store.table("scores").num_rows == 0


def test_a_shortened_file_is_reported_as_torn(folder: Path) -> None:
    path, offset, length = frames(folder, "rollouts")[2]
    os.truncate(path, offset + length // 2)
    with open_store(folder) as store:
        findings = store.verify()
        assert [finding.kind for finding in findings] == ["torn", "torn"]
        assert f"the frame ends at {offset + length}" in findings[0].message
        assert store.fetch(["x0", "x3"]).num_rows == 2
        with pytest.raises(CorruptSegmentError, match=r"'x4' .*the file has"), pytest.warns(DamagedRowsWarning):
            store.fetch(["x4"])


def test_a_missing_file_is_reported_and_other_tables_stay_readable(folder: Path) -> None:
    frames(folder, "decisions")[0][0].unlink()
    with open_store(folder) as store:
        findings = store.verify()
        assert {finding.kind for finding in findings} == {"torn"}
        assert len(findings) == FRAMES
        assert store.table("rollouts").num_rows == 8


def test_a_stray_file_is_reported_and_a_torn_tail_is_not(folder: Path) -> None:
    path, offset, length = frames(folder, "rollouts")[-1]
    frame = path.read_bytes()[offset : offset + length]
    handle = os.open(path, os.O_RDWR)
    os.pwrite(handle, frame[: length // 2], offset + length)  # a writer that died in the middle of a frame
    os.close(handle)
    with open_store(folder) as store:
        assert store.verify() == []
        store.append("rollouts", rollouts([8, 9]))
        assert store.table("rollouts").num_rows == 10
        assert store.verify() == []
    (folder / "segments" / "rollouts" / "copy of it.arrows").write_bytes(b"x")
    with open_store(folder) as store:
        assert [(one.kind, one.where) for one in store.verify()] == [("orphan", "segments/rollouts/copy of it.arrows")]


@pytest.mark.parametrize(
    ("tamper", "kind", "about"),
    [
        ("UPDATE index_rollouts SET status = 'kept', uses = 2 WHERE experience_id = 'x0'", "conservation", "x0"),
        ("UPDATE index_rollouts SET uses = 0 WHERE experience_id = 'x0'", "double_use", "x0"),
        ("UPDATE index_rollouts SET status = 'rejected' WHERE experience_id = 'x3'", "conservation", "x3"),
        ("UPDATE index_rollouts SET reserved_by = 'gone' WHERE experience_id = 'x3'", "conservation", "x3"),
        ("UPDATE index_rollouts SET task_id = 'other' WHERE experience_id = 'x3'", "conservation", "run/g1"),
        ("UPDATE index_rollouts SET group_size = 1 WHERE group_id = 'g1'", "conservation", "run/g1"),
        ("UPDATE index_rollouts SET content = x'00' WHERE experience_id = 'x3'", "catalog", "segments/rollouts"),
        ("UPDATE index_rollouts SET frame_id = 99 WHERE experience_id = 'x7'", "catalog", "rollouts"),
        ("DELETE FROM key_blocks WHERE tbl = 'scores'", "catalog", "segments/scores"),
        ("DELETE FROM index_rollouts WHERE experience_id = 'x1'", "missing_row", "scores"),
        ("DELETE FROM batches", "missing_row", "b1"),
        ("UPDATE batches SET rows = 3", "conservation", "b1"),
        ("UPDATE frames SET rows = 3 WHERE tbl = 'scores'", "catalog", "segments/scores"),
        ("UPDATE frames SET xxh3 = 1 WHERE tbl = 'scores'", "checksum", "segments/scores"),
        ("UPDATE frames SET length = length - 8 WHERE tbl = 'scores'", "checksum", "segments/scores"),
    ],
)  # fmt: skip
def test_a_catalog_that_disagrees_with_the_rows_is_reported(folder: Path, tamper: str, kind: str, about: str) -> None:
    with sqlite3.connect(folder / "catalog.sqlite") as connection:
        connection.execute(tamper)
    connection.close()
    with open_store(folder) as store:
        findings = store.verify()
    assert [one for one in findings if one.kind == kind and one.where.startswith(about)], findings
