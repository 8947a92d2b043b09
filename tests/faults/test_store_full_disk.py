"""A full or failing disk: a clear error, nothing half-visible, and a store that goes on when there is room again."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from store_rows import child_environment, rollout, rollouts, table

from buffer_engine.errors import StoreError
from buffer_engine.store import LocalStore, open_store


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 12 MiB; skipped where this user may not mount one (the file-size limit is tested everywhere)."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(path: Path) -> None:
    """Take what room is left, to the last byte."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def append_until_refused(store: LocalStore, parts: list[pa.Table]) -> tuple[int, str]:
    """How many appends were acknowledged, and the error that ended them."""
    for done, rows in enumerate(parts):
        try:
            store.append("rollouts", rows, cursors={"n": done + 1})
        except StoreError as error:
            return done, str(error)
    raise AssertionError("the disk never got full")


def long_rows(start: int, count: int) -> list[dict[str, object]]:
    length = 20_000
    return [
        rollout(number, token_ids=[number] * length, loss_mask=[True] * length, logprobs=None)
        for number in range(start, start + count)
    ]


def ids(store: LocalStore) -> list[str]:
    return store.table("rollouts", columns=["experience_id"]).column(0).to_pylist()


def test_rows_that_do_not_fit_are_refused_and_fit_again_when_there_is_room(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 5 << 20)
    with open_store(small_disk / "s") as store:
        done, error = append_until_refused(store, [table("rollouts", long_rows(at, 4)) for at in range(0, 400, 4)])
        assert re.search(r"could not write 4 rows of rollouts.*is full.*free space", error)
        assert done >= 2
        acknowledged = [f"x{number}" for number in range(4 * done)]
        assert ids(store) == acknowledged
        assert store.cursor("n") == done
        assert store.verify() == []
        ballast.unlink()
        start = len(acknowledged)
        receipt = store.append("rollouts", table("rollouts", long_rows(start, 4)))
        assert receipt.appended == {"rollouts": 4}
        assert len(ids(store)) == start + 4
    with open_store(small_disk / "s") as store:
        assert len(ids(store)) == start + 4
        assert store.verify() == []


def test_a_catalog_that_cannot_grow_leaves_the_frame_invisible(small_disk: Path) -> None:
    with open_store(small_disk / "s") as store:
        store.append("rollouts", rollouts([0]))
        fill(small_disk / "ballast")  # the segment has room ahead, the catalog has not
        done, error = append_until_refused(store, [rollouts([number]) for number in range(1, 40)])
        assert re.search(r"could not append rows.*full", error)
        written = ids(store)
        assert written == [f"x{number}" for number in range(1 + done)]
        (small_disk / "ballast").unlink()
        assert store.append("rollouts", rollouts([len(written)])).appended == {"rollouts": 1}
        assert ids(store) == [f"x{number}" for number in range(len(written) + 1)]
        assert store.verify() == []


def test_a_store_cannot_be_created_on_a_full_disk(small_disk: Path) -> None:
    fill(small_disk / "ballast")
    with pytest.raises(StoreError, match=r"could not (create|open) the store.*full"):
        open_store(small_disk / "s")


LIMITED = """
import resource, sys
from buffer_engine.errors import StoreError
from buffer_engine.store import open_store
from store_rows import rollout, rollouts, table
with open_store(sys.argv[1]) as store:
    store.append("rollouts", rollouts([0, 1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, resource.RLIM_INFINITY))
    length = 400_000
    big = rollout(2, token_ids=[7] * length, loss_mask=[True] * length, logprobs=[-1.0] * length)
    for _ in range(2):
        try:
            store.append("rollouts", table("rollouts", [big, big | {"experience_id": "x3"}]))
        except StoreError as error:
            print("full" in str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(store.append("rollouts", table("rollouts", [big])).appended["rollouts"])
    print(store.table("rollouts").num_rows, store.verify())
"""


def test_a_file_size_limit_is_a_store_error_and_not_a_crash(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "s")],
        env=child_environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["True", "True", "1", "3 []"], done.stderr


def test_rows_whose_sync_failed_are_not_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path / "s") as store:
        store.append("rollouts", rollouts([0]))

        def broken(handle: int) -> None:
            raise OSError(errno.EIO, "Input/output error")  # no disk here fails on demand

        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", broken)
            with pytest.raises(StoreError, match=r"make rows of rollouts durable.*Input/output error"):
                store.append("rollouts", rollouts([1]))
        assert ids(store) == ["x0"]
        store.append("rollouts", rollouts([1]))
        assert ids(store) == ["x0", "x1"]
        assert len(list((tmp_path / "s" / "segments" / "rollouts").iterdir())) == 2
        assert store.verify() == []
