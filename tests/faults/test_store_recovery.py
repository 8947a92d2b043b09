"""A store without its catalog, or with a damaged one, becomes a store again; what is not certain is said."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from store_rows import WHEN, decisions, manifest, model, rollout, rollouts, score, table, task
from typer.testing import CliRunner

from buffer_engine.errors import StoreError
from buffer_engine.schema import TABLES
from buffer_engine.store import LocalStore, open_store
from buffer_engine.store.base import ReadPolicy
from buffer_engine.store.recover import recover_store
from pipelines.cli.main import app


def fill(folder: Path) -> None:
    """Tasks, 12 rollouts, scores in two versions, verdicts that change, two trained batches and one that waits."""
    with open_store(folder, durability="process") as store:
        store.append("tasks", table("tasks", [task(f"t{number}") for number in range(6)]))
        store.append("models", model(0, parent=None, step=0))
        for number in range(0, 12, 2):
            at = WHEN + timedelta(seconds=number)
            pair = [rollout(one, created_at=at) for one in (number, number + 1)]
            store.append("rollouts", table("rollouts", pair), cursors={"seen": number + 2})
            late = at + timedelta(seconds=1)
            scores = [score(f"x{one}", float(one), scored_at=late) for one in (number, number + 1)]
            store.append_all(
                {
                    "decisions": decisions([number, number + 1], decided_at=late),
                    "scores": table("scores", scores),
                }
            )
        store.append("decisions", decisions([10], "reject", pass_id="p2", decided_at=WHEN + timedelta(seconds=60)))
        for step in (1, 2, 3):
            held = store.reserve(ReadPolicy.model_validate({"rows": 2}), run_id="run", batch_id=f"b{step}",
                                 model_version=step - 1)  # fmt: skip
            assert held is not None
            batch, rows = manifest(f"b{step}", step, held.experience_ids)
            store.prepare_batch(held, step=step, batch=batch, rows=rows)
            if step < 3:
                store.commit_batch(f"b{step}", step=step, model=model(step))
        event = {"run_id": "run", "step": 1, "kind": "retry", "count": 2, "experience_id": None, "detail": None,
                 "recorded_at": WHEN}  # fmt: skip
        store.append("events", table("events", [event]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fill(tmp_path / "s")
    return tmp_path / "s"


def content(store: LocalStore) -> dict[str, list[tuple[str, ...]]]:
    """Everything that does not depend on versions, as comparable values."""
    found = {name: _texts(store.table(name)) for name in TABLES}
    found["state"] = _texts(store.rollout_state().drop_columns(["sequence"]))
    found["batches now"] = _texts(store.batch_state().select(["batch_id", "status", "step", "rows"]))
    return found


def _texts(rows: pa.Table) -> list[tuple[str, ...]]:
    return sorted(tuple(map(str, row.values())) for row in rows.to_pylist())


def drop_catalog(folder: Path) -> None:
    for end in ("", "-wal", "-shm"):
        (folder / f"catalog.sqlite{end}").unlink(missing_ok=True)


def test_a_store_whose_catalog_is_gone_is_made_again_from_its_segments(folder: Path, tmp_path: Path) -> None:
    with open_store(folder, read_only=True) as store:
        before = content(store)
    drop_catalog(folder)
    with pytest.raises(StoreError, match=r"catalog was lost.*store recover"):
        open_store(folder)
    found = recover_store(folder, tmp_path / "new", durability="process")
    assert (found.findings, found.left_out) == ([], [])
    assert sorted(found.inferred) == ["b1", "b2", "b3"]
    assert dict(found.batches) == {"committed": 2, "prepared": 1}
    assert sum(found.unvouched.values()) == sum(found.rows.values())
    assert any(line.startswith("cursors: 0 could be read") for line in found.lost)
    with open_store(tmp_path / "new", durability="process") as store:
        assert content(store) == before
        # and it goes on: the prepared batch is committed, the next rows are trained
        store.commit_batch("b3", step=3, model=model(3))
        held = store.reserve(ReadPolicy.model_validate({"rows": 8}), run_id="run", batch_id="b4", model_version=3)
        assert held is not None
        assert held.experience_ids == ("x6", "x7", "x8", "x9", "x11")
        assert store.verify() == []


@pytest.mark.parametrize("size", [0, 100, 4096, 20_000, 60_000])
def test_a_catalog_that_was_cut_short_gives_what_it_still_has(folder: Path, tmp_path: Path, size: int) -> None:
    with open_store(folder, read_only=True) as store:
        before = content(store)
    assert size < (folder / "catalog.sqlite").stat().st_size
    os.truncate(folder / "catalog.sqlite", size)
    found = recover_store(folder, tmp_path / "new", durability="process")
    assert (found.findings, found.left_out) == ([], [])
    with open_store(tmp_path / "new", read_only=True) as store:
        assert content(store) == before


def test_a_sound_catalog_vouches_for_every_row_and_hides_what_was_never_acknowledged(
    folder: Path, tmp_path: Path
) -> None:
    with open_store(folder, read_only=True) as store:
        before, cursor = content(store), store.cursor("seen")
    unacknowledged(folder, rollouts([500]))
    found = recover_store(folder, tmp_path / "new", durability="process")
    assert (found.findings, found.left_out, sum(found.unvouched.values())) == ([], [], 0)
    with open_store(tmp_path / "new", read_only=True) as store:
        assert content(store) == before
        assert store.cursor("seen") == cursor


def test_rows_that_were_never_acknowledged_may_appear_once_the_catalog_is_gone_and_never_twice(
    folder: Path, tmp_path: Path
) -> None:
    unacknowledged(folder, rollouts([500, 501]))
    unacknowledged(folder, rollouts([4]))  # written by a second writer and found to be stored already
    drop_catalog(folder)
    found = recover_store(folder, tmp_path / "new", durability="process")
    assert (found.findings, found.left_out) == ([], [])
    with open_store(tmp_path / "new", read_only=True) as store:
        ids = store.table("rollouts").column("experience_id").to_pylist()
    assert sorted(ids) == sorted([f"x{number}" for number in range(12)] + ["x500", "x501"])


def unacknowledged(folder: Path, rows: pa.Table) -> None:
    """Write a frame as a writer does that is killed before the catalog transaction."""
    schema = TABLES["rollouts"].schema
    path = folder / "segments" / "rollouts" / f"77-{random.Random(rows.num_rows).getrandbits(48):012x}-1.arrows"
    path.write_bytes(
        schema.serialize().to_pybytes() + rows.to_batches()[0].serialize().to_pybytes() + bytes(4096)
    )  # fmt: skip


def test_of_two_manifests_of_one_batch_the_later_one_counts(folder: Path, tmp_path: Path) -> None:
    early = {"created_at": WHEN - timedelta(seconds=1)}
    for name, rows in zip(("batches", "batch_rows"), manifest("b3", 3, ["x8", "x9"], **early), strict=True):
        path = folder / "segments" / name / "77-00000000000a-1.arrows"
        path.write_bytes(TABLES[name].schema.serialize().to_pybytes() + rows.to_batches()[0].serialize().to_pybytes())
    drop_catalog(folder)
    found = recover_store(folder, tmp_path / "new", durability="process")
    assert (found.findings, found.left_out) == ([], [])
    with open_store(tmp_path / "new", read_only=True) as store:
        held = [row["experience_id"] for row in store.rollout_state().to_pylist() if row["reserved_by"] == "b3"]
    assert held == ["x4", "x5"]


def test_damage_in_a_segment_costs_its_own_rows_only_and_is_named(folder: Path, tmp_path: Path) -> None:
    connection = sqlite3.connect(folder / "catalog.sqlite")
    name, offset, length = connection.execute(
        "SELECT name, offset, length FROM frames JOIN segments USING (segment_id) "
        "WHERE frames.tbl = 'rollouts' ORDER BY frame_id LIMIT 1 OFFSET 4"
    ).fetchone()
    connection.close()
    handle = os.open(folder / "segments" / name, os.O_RDWR)
    os.pwrite(handle, os.urandom(64), offset)  # the head of the batch: without a list nobody knows its length
    os.close(handle)
    drop_catalog(folder)
    found = recover_store(folder, tmp_path / "new", durability="process")
    assert found.findings == []
    assert f"segments/{name}@{offset}: {length} bytes that are no record batch" in found.left_out
    with open_store(tmp_path / "new", read_only=True) as store:
        ids = store.table("rollouts").column("experience_id").to_pylist()
        assert ids == [f"x{number}" for number in range(12) if number not in (8, 9)]
        assert store.rollout_state().num_rows == 10
    # what is about the lost rows is left out too, and said
    assert sum("1 of 2 rows" in line or "2 of 2 rows" in line for line in found.left_out) >= 2


def test_with_its_catalog_a_flipped_byte_in_a_segment_is_left_out_by_its_checksum(folder: Path, tmp_path: Path) -> None:
    connection = sqlite3.connect(folder / "catalog.sqlite")
    name, offset, length = connection.execute(
        "SELECT name, offset, length FROM frames JOIN segments USING (segment_id) "
        "WHERE frames.tbl = 'rollouts' ORDER BY frame_id LIMIT 1 OFFSET 5"
    ).fetchone()
    connection.close()
    handle = os.open(folder / "segments" / name, os.O_RDWR)
    (byte,) = os.pread(handle, 1, offset + length - 200)
    os.pwrite(handle, bytes([byte ^ 1]), offset + length - 200)
    os.close(handle)
    found = recover_store(folder, tmp_path / "new", durability="process")
    assert found.findings == []
    assert f"segments/{name}@{offset}: 2 rows whose bytes have changed since they were written" in found.left_out


def test_a_flipped_status_does_not_train_a_batch_twice(folder: Path, tmp_path: Path) -> None:
    connection = sqlite3.connect(folder / "catalog.sqlite")
    connection.execute("UPDATE batches SET status = 'prepared' WHERE batch_id = 'b2'")
    connection.commit()
    connection.close()
    found = recover_store(folder, tmp_path / "new", durability="process")
    assert dict(found.batches) == {"committed": 2, "prepared": 1}


def test_the_command_says_what_was_taken_inferred_and_lost(folder: Path, tmp_path: Path) -> None:
    drop_catalog(folder)
    done = CliRunner().invoke(app, ["store", "recover", str(folder), "--into", str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    for said in ("batches: 2 committed, 1 prepared", "worked out from rows: 3", "lost: cursors", "never acknowledged"):
        assert said in " ".join(done.output.split())
    again = CliRunner().invoke(app, ["store", "recover", str(folder), "--into", str(tmp_path / "new")])
    assert "needs a new or empty folder" in str(again.exception)
    shutil.rmtree(folder / "segments")
    with pytest.raises(StoreError, match="no segments"):
        recover_store(folder, tmp_path / "other")
