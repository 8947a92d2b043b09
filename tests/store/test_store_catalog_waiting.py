"""What commits wait for: not for the write-ahead log to be folded in, and not longer than they must for each other."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path

import pytest
from store_rows import rollouts

from buffer_engine.errors import StoreError
from buffer_engine.store import catalog as catalog_module
from buffer_engine.store import checkpointing, open_store

PAGE = 4096


def test_the_log_is_folded_in_while_the_store_is_open_and_commits_do_not_do_it(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", durability="process") as store:
        pages = 0
        with sqlite3.connect(store.path / "catalog.sqlite") as look:
            for first in range(0, 12_000, 400):
                store.append("rollouts", rollouts(range(first, first + 400)))
            deadline = time.monotonic() + 20
            while pages == 0 and time.monotonic() < deadline:
                (pages,) = look.execute("PRAGMA page_count").fetchone()
                size = (store.path / "catalog.sqlite").stat().st_size
                pages = size // PAGE if size > 100 * PAGE else 0
                time.sleep(0.01)
        look.close()
        assert pages > 100, "the catalog file never grew: its pages lie in the log only"
        names = [thread.name for thread in threading.enumerate()]
        assert "store checkpoints" in names
        assert store.verify() == []
    assert "store checkpoints" not in [thread.name for thread in threading.enumerate()]


def test_a_commit_folds_in_a_log_that_became_too_long_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing.Checkpointer, "committed", lambda self, writer: None)
    monkeypatch.setattr(catalog_module, "BACKSTOP_PAGES", 50)
    with open_store(tmp_path / "store", durability="process") as store:
        for first in range(0, 6000, 400):
            store.append("rollouts", rollouts(range(first, first + 400)))
        assert (store.path / "catalog.sqlite").stat().st_size > 100 * PAGE
        # each commit writes about 200 pages, and the log begins anew with the next
        assert (store.path / "catalog.sqlite-wal").stat().st_size < 1000 * PAGE


def test_an_append_waits_for_another_holder_of_the_catalog_and_goes_on_at_once(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", durability="process") as store:
        store.append("rollouts", rollouts([0]))
        other = sqlite3.connect(store.path / "catalog.sqlite", isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        released: list[float] = []

        def release() -> None:
            time.sleep(0.5)
            other.execute("ROLLBACK")
            released.append(time.monotonic())

        thread = threading.Thread(target=release)
        thread.start()
        store.append("rollouts", rollouts([1]))
        ended = time.monotonic()
        thread.join()
        other.close()
        assert 0 <= ended - released[0] < 0.4
        assert store.table("rollouts").num_rows == 2


def test_an_append_that_waited_too_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path / "store", durability="process") as store:
        store.append("rollouts", rollouts([0]))
        monkeypatch.setattr(catalog_module, "BUSY_SECONDS", 0.2)
        other = sqlite3.connect(store.path / "catalog.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="another process"):
            store.append("rollouts", rollouts([1]))
        other.execute("ROLLBACK")
        other.close()
        store.append("rollouts", rollouts([1]))
        assert store.table("rollouts").num_rows == 2
