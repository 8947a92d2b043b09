"""Stores of earlier schema versions, kept as files, opened by this package."""

from __future__ import annotations

import sqlite3
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from buffer_engine.errors import StoreVersionError
from buffer_engine.inspect import connect_store
from buffer_engine.schema import SCHEMA_VERSION
from buffer_engine.store import open_store
from pipelines.cli.main import app

FIXTURES = Path(__file__).parent / "fixtures"
EARLIER = list(range(1, SCHEMA_VERSION))


def unpacked(version: int, folder: Path) -> Path:
    """The kept store of a schema version."""
    with tarfile.open(FIXTURES / f"v{version}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "store"


@pytest.mark.parametrize("version", [*EARLIER, SCHEMA_VERSION])
def test_a_kept_store_is_migrated_where_needed_and_says_what_it_always_said(version: int, tmp_path: Path) -> None:
    path = unpacked(version, tmp_path)
    with open_store(path, create=False) as store:
        assert store.migrated_from == (version if version < SCHEMA_VERSION else None)
        assert store.info().schema_version == SCHEMA_VERSION
        assert store.verify() == []
        assert store.table("rollouts").column("experience_id").to_pylist() == [f"x{n}" for n in range(6)]
        assert store.cursor("tasks/train") == 2
        late = store.narrow("scores", ["x0"]).to_pylist()
        assert [(row["version"], row["value"], row["author"]) for row in late] == [
            (1, 0.0, "answer"),
            (2, 0.25, "anna"),
        ]
        state = {row["experience_id"]: row for row in store.rollout_state().to_pylist()}
        assert [state[f"x{n}"]["uses"] for n in range(6)] == [1, 1, 0, 0, 0, 0]
        assert state["x5"]["status"] == "rejected"
        assert [(record.step, record.status) for record in store.batches("run")] == [(1, "committed"), (2, "prepared")]
        with connect_store(store) as inspection:
            rows = inspection.rows("SELECT experience_id, fate FROM experiences")
        fates = {row["experience_id"]: row["fate"] for row in rows}
        assert (fates["x0"], fates["x2"], fates["x5"]) == ("trained", "reserved", "failed")
    with open_store(path, create=False) as again:
        assert again.migrated_from is None


@pytest.mark.parametrize("version", EARLIER)
def test_the_command_migrates_and_says_what_it_did(version: int, tmp_path: Path) -> None:
    path = unpacked(version, tmp_path)
    first, second = (CliRunner().invoke(app, ["store", "migrate", str(path)]) for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert f"from schema version {version} to {SCHEMA_VERSION}" in first.output
    assert f"already has schema version {SCHEMA_VERSION}" in second.output


@pytest.mark.parametrize("version", EARLIER)
def test_reading_an_earlier_store_explains_how_to_migrate_and_changes_nothing(version: int, tmp_path: Path) -> None:
    path = unpacked(version, tmp_path)
    before = (path / "catalog.sqlite").read_bytes()
    with pytest.raises(StoreVersionError, match=f"version {version}, this package reads .*store migrate"):
        open_store(path, read_only=True)
    assert (path / "catalog.sqlite").read_bytes() == before


@pytest.mark.parametrize("version", EARLIER)
def test_a_migrated_catalog_has_the_tables_of_a_new_one(version: int, tmp_path: Path) -> None:
    path = unpacked(version, tmp_path)
    open_store(path, create=False).close()
    open_store(tmp_path / "new").close()
    assert _columns(path) == _columns(tmp_path / "new")


def _columns(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Name, type, nullability, default and place in the key of every column of every table."""
    connection = sqlite3.connect(path / "catalog.sqlite")
    names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    found = {name: [row[1:] for row in connection.execute(f"PRAGMA table_info({name})")] for name in names}
    connection.close()
    return found
