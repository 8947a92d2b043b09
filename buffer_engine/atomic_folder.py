"""Folders that are complete or absent: written beside their place, made durable, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_folder(directory: Path) -> Generator[Path]:
    """A new folder to write into; on leaving the block it takes the place of `directory`.

    When the block raises, the new folder is removed and `directory` is as before. Left-overs of a killed process are
    removed by the next call for the same place. Replacing an existing folder takes two renames: a process killed
    between them leaves the old content under `.NAME.old`, complete.
    """
    directory = directory.absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.partial")
    old = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        _make_durable(partial)
        if directory.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(directory, old)
        os.rename(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def _make_durable(folder: Path) -> None:
    """Bring every file and every folder below `folder` to the disk."""
    for path in [*sorted(folder.rglob("*")), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
