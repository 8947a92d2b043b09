"""Where segment files lie, behind one interface: a folder here, an object store elsewhere.

The catalog knows files by name (`<table>/<writer>-<n>.arrows`, `<table>/<n>.parquet`). A file that the catalog lists is
never changed except by growing at its end.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from buffer_engine.store.faults import explained
from buffer_engine.store.layout import StoreLayout


class SegmentFiles(Protocol):
    """The files of one store."""

    def local(self, name: str, *, at_least: int = 0) -> Path:
        """A path on this machine from which the file can be mapped.

        Args:
            at_least: bytes that must be there; a copy that is shorter is fetched anew.
        Raises:
            FileNotFoundError: there is no such file.
        """
        ...

    def publish(self, name: str, made: Path) -> None:
        """Take over a finished file under `name`, durably; `made` is gone afterwards.

        Raises:
            StoreError: the disk is full or read-only, or the object store refuses.
        """
        ...

    def fetch(self, names: Sequence[str]) -> None:
        """Have these files here soon, side by side; for who will map them one after the other.

        Raises:
            FileNotFoundError: there is no such file.
        """
        ...

    def renew(self, name: str) -> bool:
        """Replace a copy whose bytes are wrong by a fresh one; False when the file here is the only one.

        Raises:
            FileNotFoundError: there is no such file any more.
        """
        ...

    def remove(self, name: str) -> None:
        """Delete a file that no frame refers to; a missing one is no error."""
        ...

    def names(self) -> list[str]:
        """Everything that is there, sorted."""
        ...


class LocalFiles:
    """Segment files below the store's own folder."""

    def __init__(self, layout: StoreLayout) -> None:
        self._layout = layout

    def local(self, name: str, *, at_least: int = 0) -> Path:
        """See `SegmentFiles.local`; a file of a folder is never short of what it is."""
        path = self._layout.segment(name)
        if not path.exists():
            raise FileNotFoundError(path)
        return path

    def publish(self, name: str, made: Path) -> None:
        """See `SegmentFiles.publish`."""
        target = self._layout.segment(name)
        with explained(target, "take over a segment"):
            target.parent.mkdir(parents=True, exist_ok=True)
            sync_path(made)
            os.rename(made, target)
            sync_path(target.parent)

    def fetch(self, names: Sequence[str]) -> None:
        """See `SegmentFiles.fetch`; files of a folder are here."""

    def renew(self, name: str) -> bool:
        """See `SegmentFiles.renew`; a file in a folder is the only one."""
        return False

    def remove(self, name: str) -> None:
        """See `SegmentFiles.remove`."""
        path = self._layout.segment(name)
        with explained(path, "remove a segment"):
            path.unlink(missing_ok=True)

    def names(self) -> list[str]:
        """See `SegmentFiles.names`."""
        return self._layout.segment_files()


def sync_path(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
