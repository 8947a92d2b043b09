"""Opening: what is a store, what is not, and what to do about it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from store_rows import child_environment, rollouts

from buffer_engine.errors import StoreBusyError, StoreError, StoreVersionError
from buffer_engine.schema import SCHEMA_VERSION
from buffer_engine.store import open_store


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=child_environment(), capture_output=True, text=True, timeout=60
    )  # fmt: skip


def test_a_missing_store_is_made_only_when_asked(tmp_path: Path) -> None:
    for options in ({"create": False}, {"read_only": True}):
        with pytest.raises(StoreError, match="there is no store here"):
            open_store(tmp_path / "s", **options)
    assert not (tmp_path / "s").exists()
    with open_store(tmp_path / "deep" / "s") as store:
        assert (store.version(), dict(store.info().rows)) == (0, {})
    with open_store(tmp_path / "deep" / "s", create=False) as store:
        assert store.verify() == []


def test_an_empty_folder_becomes_a_store_but_is_none(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="empty, not a store"):
        open_store(tmp_path, create=False)
    open_store(tmp_path).close()
    open_store(tmp_path, create=False).close()


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    for options in ({}, {"read_only": True}):
        with pytest.raises(StoreError, match=r"not a store.*thesis\.tex"):
            open_store(tmp_path, **options)
    assert os.listdir(tmp_path) == ["thesis.tex"]
    with pytest.raises(StoreError, match="this is a file"):
        open_store(tmp_path / "thesis.tex")


@pytest.mark.parametrize("read_only", [True, False])
def test_a_catalog_that_is_not_ours_is_refused_and_unchanged(tmp_path: Path, read_only: bool) -> None:
    catalog = tmp_path / "catalog.sqlite"
    with sqlite3.connect(catalog) as connection:
        connection.execute("CREATE TABLE other (a)")
    connection.close()
    before = catalog.read_bytes()
    with pytest.raises(StoreError, match="not a store's catalog"):
        open_store(tmp_path, read_only=read_only)
    assert catalog.read_bytes() == before
    catalog.write_bytes(b"no database at all, but long enough to be read as a header of one" * 40)
    with pytest.raises(StoreError, match="damaged or not a catalog"):
        open_store(tmp_path, read_only=read_only)


@pytest.mark.parametrize("read_only", [True, False])
def test_a_newer_store_is_refused_with_both_versions(tmp_path: Path, read_only: bool) -> None:
    open_store(tmp_path / "s").close()
    with sqlite3.connect(tmp_path / "s" / "catalog.sqlite") as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(
        StoreVersionError, match=rf"version {SCHEMA_VERSION + 1}.*up to {SCHEMA_VERSION}; install a newer"
    ):
        open_store(tmp_path / "s", read_only=read_only)


def test_a_store_opened_for_reading_refuses_to_write(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as writer:
        writer.append("rollouts", rollouts([0]))
        with open_store(tmp_path / "s", read_only=True) as reader:
            with pytest.raises(StoreError, match="read_only=True"):
                reader.append("rollouts", rollouts([1]))
            writer.append("rollouts", rollouts([1]))
            assert reader.table("rollouts").num_rows == 2
            assert reader.verify() == []


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed; open it again"):
        store.version()


def test_a_forked_child_must_open_the_store_itself(tmp_path: Path) -> None:
    code = """
import os, sys
from buffer_engine.errors import StoreError
from buffer_engine.store import open_store
store = open_store(sys.argv[1])
child = os.fork()
if child == 0:
    try:
        store.version()
    except StoreError as error:
        os._exit(7 if "fork" in str(error) else 8)
    os._exit(9)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), store.version())
"""
    assert run_python(code, str(tmp_path / "s")).stdout.split() == ["7", "0"]


def test_a_run_can_be_held_by_one_process_and_is_free_when_it_dies(tmp_path: Path) -> None:
    code = """
import sys
from buffer_engine.store import open_store
with open_store(sys.argv[1]) as store, store.open_run("a/b"):
    print("held", flush=True)
    sys.stdin.read()
"""
    open_store(tmp_path / "s").close()
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "s")], env=child_environment(), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with open_store(tmp_path / "s") as store:
            with pytest.raises(StoreBusyError, match=f"'a/b' is being run by process {child.pid}"):
                with store.open_run("a/b"):
                    pass
            with store.open_run("other"):
                pass
            child.kill()
            child.wait()
            with store.open_run("a/b"):
                pass
    finally:
        child.kill()
        child.communicate()


def test_a_run_can_be_held_once_inside_a_process(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store, open_store(tmp_path / "s") as other:
        with store.open_run("r"):
            with pytest.raises(StoreBusyError, match=f"process {os.getpid()}"):
                with other.open_run("r"):
                    pass
        with other.open_run("r"):
            pass


READ_ONLY = """
import os, sys
from buffer_engine.errors import StoreError
from buffer_engine.store import open_store
if os.getuid() == 0:
    os.setuid(65534)  # root may write anywhere
with open_store(sys.argv[1], read_only=True) as store:
    print(store.table("rollouts").num_rows, store.verify())
try:
    open_store(sys.argv[1])
except StoreError as error:
    print("read-only" in str(error), "read_only=True" in str(error))
"""


@pytest.fixture
def public_folder():
    """A folder that another user may enter, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        for path in folder.rglob("*"):
            path.chmod(0o755)


def test_a_read_only_folder_can_be_inspected_and_says_why_it_cannot_be_written(public_folder: Path) -> None:
    with open_store(public_folder / "s") as store:
        store.append("rollouts", rollouts([0, 1]))
    for path in sorted((public_folder / "s").rglob("*"), reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    (public_folder / "s").chmod(0o555)
    done = run_python(READ_ONLY, str(public_folder / "s"))
    assert done.stdout.splitlines() == ["2 []", "True True"], done.stderr


def test_a_read_only_folder_with_an_unfinished_log_says_to_copy_it(public_folder: Path) -> None:
    with open_store(public_folder / "s") as store:
        store.append("rollouts", rollouts([0, 1]))
        shutil.copytree(public_folder / "s", public_folder / "copy")
    (public_folder / "copy" / "catalog.sqlite-shm").unlink()
    for path in sorted((public_folder / "copy").rglob("*"), reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    (public_folder / "copy").chmod(0o555)
    done = run_python(READ_ONLY, str(public_folder / "copy"))
    assert "StoreError" in done.stderr
    assert "copied to a writable place" in done.stderr
