"""A whole store out and in again: same rows, keys, states and versions; damage and crashes leave nothing half."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from exchange_rows import assert_equal_stores, make_store
from store_rows import child_environment, decisions, manifest, rollout, rollouts, table

from buffer_engine.errors import DamagedRowsWarning, ExchangeError, StoreError, StoreVersionError, UsageError
from buffer_engine.exchange.backup import back_up, check_backup, restore
from buffer_engine.exchange.export import export
from buffer_engine.exchange.relations import Extraction, Selection
from buffer_engine.schema import SCHEMA_VERSION, TABLES
from buffer_engine.store.base import ReadPolicy
from buffer_engine.store.erase import EraseRule
from buffer_engine.store.opening import open_store


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    make_store(tmp_path / "store")
    (tmp_path / "store" / "specs").mkdir()
    (tmp_path / "store" / "specs" / "run.yaml").write_text("name: run\n")
    with open_store(tmp_path / "store") as store:
        # one batch still reserved, one given back
        store.append("decisions", decisions([6]))
        assert store.reserve(ReadPolicy(rows=1, incomplete="use"), run_id="run", batch_id="open", model_version=1)
        store.append("rollouts", rollouts([8, 9]))
        store.append("decisions", decisions([8, 9]))
        assert store.reserve(ReadPolicy(rows=2), run_id="run", batch_id="back", model_version=1)
        store.release("back")
        store.append_all({}, cursors={"tasks/train": 9})
        back_up(store, tmp_path / "out")
    return tmp_path / "out"


def test_a_restored_store_is_the_same_at_every_version(tmp_path: Path, exported: Path) -> None:
    receipt = restore(exported, tmp_path / "again")
    with open_store(tmp_path / "store") as before, open_store(tmp_path / "again") as after:
        assert_equal_stores(before, after)
        assert after.verify() == []
        assert after.cursor("tasks/train") == 9
        assert receipt.rows == {name: before.table(name).num_rows for name in TABLES}
        [media_id] = after.table("media").column("media_id").to_pylist()
        assert after.media(media_id) == b"picture"
        assert set(after.rollout_state().column("status").to_pylist()) == {"kept", "rejected", "new"}
        assert set(after.batch_state().column("status").to_pylist()) == {
            "committed",
            "prepared",
            "reserved",
            "released",
        }
    assert (tmp_path / "again" / "specs" / "run.yaml").read_text() == "name: run\n"


def test_a_restored_store_goes_on_where_the_other_stood(tmp_path: Path, exported: Path) -> None:
    restore(exported, tmp_path / "again")
    with open_store(tmp_path / "store") as before, open_store(tmp_path / "again") as after:
        for store in (before, after):
            store.commit_batch("run-2", step=2)
            reservation = store.reserve(ReadPolicy(rows=2), run_id="run", batch_id="next", model_version=2)
            assert reservation is not None
            assert reservation.experience_ids == ("x8", "x9")
            batch, rows = manifest("next", 3, reservation.experience_ids)
            store.prepare_batch(reservation, step=3, batch=batch, rows=rows)
            store.append("rollouts", rollouts([20]))
        assert before.version() == after.version()
        assert before.rollout_state().equals(after.rollout_state())
        assert after.verify() == []


def test_restoring_the_same_export_again_changes_nothing(tmp_path: Path, exported: Path) -> None:
    restore(exported, tmp_path / "again")
    with open_store(tmp_path / "again") as store:
        store.append("rollouts", rollouts([30]))
        version = store.version()
    assert restore(exported, tmp_path / "again").unchanged
    with open_store(tmp_path / "again") as store:
        assert store.version() == version


def test_an_existing_store_is_not_restored_over(tmp_path: Path, exported: Path) -> None:
    with pytest.raises(UsageError, match="into a new place only"):
        restore(exported, tmp_path / "store")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="into a new place only"):
        restore(exported, tmp_path / "file")


def test_the_export_of_an_empty_store_can_be_restored(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        back_up(store, tmp_path / "out")
    restore(tmp_path / "out", tmp_path / "again")
    with open_store(tmp_path / "again") as store:
        assert store.version() == 0
        assert store.verify() == []


def test_every_file_is_in_the_manifest_with_rows_and_checksum(exported: Path) -> None:
    told = json.loads((exported / "manifest.json").read_text())
    there = {str(path.relative_to(exported)) for path in exported.rglob("*") if path.is_file()}
    assert set(told["files"]) == there - {"manifest.json"}
    assert told["schema_version"] == SCHEMA_VERSION
    for name, rows in told["rows"].items():
        parts = sorted(exported.glob(f"tables/{name}-*.parquet"))
        assert sum(pq.read_metadata(part).num_rows for part in parts) == rows
        assert sum(told["files"][f"tables/{part.name}"]["rows"] for part in parts) == rows


@pytest.mark.parametrize("name", ["tables/rollouts-00000.parquet", "state/rollout_state.parquet"])
def test_a_changed_or_missing_file_is_named_and_nothing_is_restored(tmp_path: Path, exported: Path, name: str) -> None:
    data = bytearray((exported / name).read_bytes())
    data[len(data) // 2] ^= 1
    (exported / name).write_bytes(data)
    with pytest.raises(ExchangeError, match="bytes have changed since they were exported"):
        restore(exported, tmp_path / "again")
    (exported / name).unlink()
    with pytest.raises(ExchangeError, match="the file is missing"):
        check_backup(exported)
    assert not (tmp_path / "again").exists()


def test_a_newer_export_and_a_foreign_manifest_are_refused(tmp_path: Path, exported: Path) -> None:
    told = json.loads((exported / "manifest.json").read_text())
    (exported / "manifest.json").write_text(json.dumps(told | {"schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(StoreVersionError, match="install a newer"):
        restore(exported, tmp_path / "again")
    (exported / "manifest.json").write_text('{"kind": "other"}')
    with pytest.raises(ExchangeError, match="not the manifest of an exported store"):
        restore(exported, tmp_path / "again")


@pytest.mark.parametrize("name", ["media/../../../stolen", "/etc/passwd", "catalog.sqlite"])
def test_a_manifest_cannot_reach_outside(tmp_path: Path, exported: Path, name: str) -> None:
    told = json.loads((exported / "manifest.json").read_text())
    told["files"][name] = {"bytes": 0, "sha256": ""}
    (exported / "manifest.json").write_text(json.dumps(told))
    with pytest.raises(ExchangeError, match="which no export has"):
        restore(exported, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_tampered_bookkeeping_does_not_become_a_store(tmp_path: Path, exported: Path) -> None:
    path = exported / "state" / "rollout_state.parquet"
    state = pq.read_table(path)
    status = state.schema.get_field_index("status")
    pq.write_table(state.set_column(status, state.schema.field(status), [["rejected"] * state.num_rows]), path)
    told = json.loads((exported / "manifest.json").read_text())
    import hashlib

    told["files"]["state/rollout_state.parquet"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (exported / "manifest.json").write_text(json.dumps(told))
    with pytest.raises(StoreError, match="rollout_state came out differently"):
        restore(exported, tmp_path / "again")
    assert not (tmp_path / "again").exists()


_WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from store_rows import rollouts, decisions
from buffer_engine.store.opening import open_store
with open_store(sys.argv[1], durability="process") as store:
    number = 0
    while True:
        store.append_all({"rollouts": rollouts([number, number + 1]), "decisions": decisions([number, number + 1])})
        number += 2
        if number == 20:
            print("ready", flush=True)
"""


def test_a_store_is_exported_at_one_version_while_another_process_writes(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path / "store"), str(Path(__file__).parents[1])],
        env=child_environment(), stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()
    try:
        with open_store(tmp_path / "store", read_only=True) as store:
            # slow enough that the writer commits in between
            receipt = back_up(store, tmp_path / "out", advance=lambda rows: time.sleep(0.002))
            assert store.version() > receipt.version
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    restore(tmp_path / "out", tmp_path / "again")
    with open_store(tmp_path / "again") as store:
        assert store.version() == receipt.version
        assert store.table("rollouts").num_rows == store.table("decisions").num_rows == 2 * receipt.version
        assert store.verify() == []


_RESTORER = """
import sys
from pathlib import Path
from buffer_engine.exchange.backup import restore
restore(Path(sys.argv[1]), Path(sys.argv[2]), advance=lambda rows: print(rows, flush=True))
"""


@pytest.mark.parametrize("commits", [1, 8])
def test_a_killed_restore_leaves_no_store(tmp_path: Path, exported: Path, commits: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _RESTORER, str(exported), str(tmp_path / "again")],
        env=child_environment(), stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    for _ in range(commits):
        child.stdout.readline()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not (tmp_path / "again").exists()
    restore(exported, tmp_path / "again")
    with open_store(tmp_path / "store") as before, open_store(tmp_path / "again") as after:
        assert_equal_stores(before, after)


def test_a_compacted_and_partly_erased_store_comes_back_as_it_is(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    with open_store(tmp_path / "store") as store:
        store.append("decisions", decisions([5], "reject", pass_id="p2"))
        store.compact(everything=True, grace_seconds=0)
        store.append("rollouts", rollouts([40, 41]))
        erased = store.erase(EraseRule(experience_ids=("x5",)), reason="asked to", author="anna", grace_seconds=0)
        assert erased.rows == 1
        back_up(store, tmp_path / "out")
        restore(tmp_path / "out", tmp_path / "again")
        with open_store(tmp_path / "again") as again:
            assert again.verify() == store.verify() == []
            assert_equal_stores(store, again)
            # the erased row is still known by what it said: writing it again is a no-op in both
            gone = table(
                "rollouts",
                [rollout(5, task_id="t1", group_id="g-failed", group_size=1, sample_index=0, error="timeout: 3 s")],
            )
            for one in (store, again):
                assert one.append("rollouts", gone).unchanged == {"rollouts": 1}


def test_a_store_with_damaged_rows_is_not_copied_in_part(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        store.append("rollouts", rollouts(range(4)))
        store.append("rollouts", rollouts(range(4, 8)))
    [segment] = (tmp_path / "store" / "segments" / "rollouts").glob("*.arrows")
    data = bytearray(segment.read_bytes())
    at = data.index(b"question 5")
    data[at : at + 1] = b"Q"
    segment.write_bytes(data)
    for _ in range(2):  # found, and then known to be damaged
        with open_store(tmp_path / "store") as store:
            with pytest.raises((ExchangeError, StoreError), match="damaged"):
                back_up(store, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    with open_store(tmp_path / "store") as store, Extraction(store) as extraction:
        with pytest.warns(DamagedRowsWarning):
            receipt = export(extraction, tmp_path / "rows.parquet", [Selection("rollouts", "table")], format="parquet")
    assert receipt.rows == {"rollouts": 4}
