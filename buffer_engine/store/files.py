"""Where segment files lie, behind one interface: a folder here, an object store elsewhere.

The catalog knows files by name (`<table>/<writer>-<n>.arrows`, `<table>/<n>.parquet`). A file that the catalog lists is
never changed except by growing at its end.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from buffer_engine.store.faults import explained
from buffer_engine.store.layout import StoreLayout

_JUST_BEGUN = 60.0
"""Seconds for which an empty stream may belong to a writer that has not locked it yet."""


class SegmentFiles(Protocol):
    """The files of one store.

    Attributes:
        in_place: whether `local` gives the file itself rather than a copy of it.
    """

    in_place: bool

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

    def being_written(self, name: str, head: int) -> bool:
        """Whether a process appends to a stream, or may be about to.

        Args:
            head: bytes of the schema message that it begins with.
        """
        ...

    def bytes_of(self, names: Sequence[str]) -> int:
        """Bytes that these files take where they lie; a missing one takes none."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Delete files that no frame refers to, for good; a missing one is no error.

        Raises:
            StoreError: the disk is read-only, or the object store refuses.
        """
        ...

    def names(self) -> list[str]:
        """Everything that is there, sorted."""
        ...


class LocalFiles:
    """Segment files below the store's own folder.

    A process that appends holds a shared lock on the file that it writes, which falls with the process however it
    ends; a stream whose lock is free has no writer.
    """

    in_place = True

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

    def being_written(self, name: str, head: int) -> bool:
        """See `SegmentFiles.being_written`."""
        try:
            handle = os.open(self._layout.segment(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True  # its writer was killed before it made the file, or is about to make it
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            if any(os.pread(handle, 4, head)):  # by a writer that had locked the file before
                return False
            return time.time() - os.fstat(handle).st_mtime < _JUST_BEGUN
        finally:
            os.close(handle)

    def bytes_of(self, names: Sequence[str]) -> int:
        """See `SegmentFiles.bytes_of`: of the disk."""
        total = 0
        for name in names:
            with suppress(FileNotFoundError):
                total += self._layout.segment(name).stat().st_blocks * 512
        return total

    def remove(self, names: Sequence[str]) -> None:
        """See `SegmentFiles.remove`."""
        paths = [self._layout.segment(name) for name in names]
        for path in paths:
            with explained(path, "remove a segment"):
                path.unlink(missing_ok=True)
        for folder in {path.parent for path in paths}:
            if folder.exists():
                sync_path(folder)  # else a file could come back that the catalog no longer knows

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
