"""A process that opens a large store reads as little of the catalog as one that opens a small store."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_rows import decisions, rollouts

from buffer_engine.store import open_store
from buffer_engine.store.base import ReadPolicy
from buffer_engine.store.catalog import Catalog

STEP = 100


def filled(path: Path, rows: int) -> Path:
    with open_store(path, durability="process") as store:
        for first in range(0, rows, 1000):
            numbers = range(first, min(first + 1000, rows))
            store.append_all({"rollouts": rollouts(numbers), "decisions": decisions(numbers)})
    return path


def steps(path: Path) -> int:
    """Hundreds of steps of SQLite's machine for a first batch: reserved, located and read."""
    counted = 0

    def count() -> int:
        nonlocal counted
        counted += 1
        return 0

    with open_store(path, create=False, durability="process") as store:
        catalog = store._catalog  # pyright: ignore[reportPrivateUsage]
        with catalog.transaction("count its steps") as writer:
            pass
        for connection in (writer, catalog.read()):
            connection.set_progress_handler(count, STEP)
        held = store.reserve(ReadPolicy.model_validate({"rows": 64}), run_id="run", batch_id="first", model_version=0)
        assert held is not None
        assert len(held.experience_ids) == 64
        assert store.padded(held.experience_ids).lengths.tolist() == [4] * 64
        assert store.fetch(held.experience_ids).num_rows == 64
        store.release("first")
    return counted


def test_the_first_batch_of_a_process_costs_the_same_in_a_store_ten_times_as_large(tmp_path: Path) -> None:
    small, large = steps(filled(tmp_path / "small", 2000)), steps(filled(tmp_path / "large", 20_000))
    assert small > 10, "nothing was counted"
    assert large <= 1.2 * small, (small, large)


def test_opening_a_store_scans_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(tmp_path / "store", 2000)
    seen: list[str] = []
    connect = Catalog._connect  # pyright: ignore[reportPrivateUsage]

    def traced(self: Catalog) -> object:
        connection = connect(self)
        connection.set_trace_callback(seen.append)
        return connection

    monkeypatch.setattr(Catalog, "_connect", traced)
    open_store(path, create=False).close()
    assert seen
    assert not [
        statement for statement in seen if "index_" in statement or "frames" in statement or "key_" in statement
    ]
