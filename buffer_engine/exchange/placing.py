"""Where an export goes: nothing is overwritten, and what is there is whole."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from buffer_engine.atomic_folder import atomic_folder
from buffer_engine.errors import UsageError
from buffer_engine.store.faults import explained
from buffer_engine.store.files import sync_path


def require_free(target: Path) -> None:
    """Refuse a place that is taken.

    Raises:
        UsageError: something is there already; an empty folder is not something.
    """
    taken = target.is_symlink() or target.exists()
    if taken and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"{target}: is there already, and an export overwrites nothing; name another place")


@contextmanager
def new_folder(target: Path) -> Generator[Path]:
    """A folder to write into that takes its place, durably, when the block ends well.

    Raises:
        UsageError: see `require_free`.
        StoreError: the disk is full or read-only.
    """
    require_free(target)
    with explained(target, "write the export"), atomic_folder(target) as folder:
        yield folder


@contextmanager
def new_file(target: Path) -> Generator[Path]:
    """A path to write to that takes its place, durably, when the block ends well.

    Raises:
        UsageError: see `require_free`.
        StoreError: the disk is full or read-only.
    """
    require_free(target)
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    with explained(target, "write the export"):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield draft
            sync_path(draft)
            require_free(target)
            os.rename(draft, target)
            sync_path(target.parent)
        finally:
            draft.unlink(missing_ok=True)
