"""Where a store keeps what: the folder, its files, and the names in it.

One place knows the names, so that `verify` can tell a file of ours from a stray one and a foreign folder is refused
before anything is written into it.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from buffer_engine.errors import StoreError

CATALOG = "catalog.sqlite"
SEGMENTS = "segments"
SEARCH_INDEX = "search.sqlite"
RUNS = "runs"
ADDRESSES = "store.json"
CACHE = "cache"
SEGMENT_SUFFIX = ".arrows"


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """Paths inside a store folder."""

    root: Path

    @property
    def catalog(self) -> Path:
        """The SQLite file whose transactions are the commit point."""
        return self.root / CATALOG

    @property
    def segments(self) -> Path:
        """Folder of the segment files, one folder per table below it."""
        return self.root / SEGMENTS

    @property
    def addresses(self) -> Path:
        """File that says where catalog and segments lie when they are not in the folder."""
        return self.root / ADDRESSES

    @property
    def cache(self) -> Path:
        """Folder of copies of objects; anything in it may be deleted at any time."""
        return self.root / CACHE

    def segment(self, name: str) -> Path:
        """Path of the segment the catalog calls `name` (`<table>/<writer>-<n>.arrows`)."""
        return self.segments / name

    def run_lock(self, run_id: str) -> Path:
        """Lock file of a run; the id is quoted, so any text is a file name."""
        return self.root / RUNS / f"{quote(run_id, safe='')}.lock"

    def segment_files(self) -> list[str]:
        """Names of everything below the segment folder, as the catalog writes them."""
        if not self.segments.is_dir():
            return []
        return sorted(str(path.relative_to(self.segments)) for path in self.segments.rglob("*") if path.is_file())

    def writable(self) -> bool:
        """Whether this process may create files in the folder (a read-only mount answers no even to root)."""
        return os.access(self.root, os.W_OK | os.X_OK)


def segment_name(table: str, writer: str, number: int) -> str:
    """Name of a writer's `number`-th segment of a table."""
    return f"{table}/{writer}-{number}{SEGMENT_SUFFIX}"


def new_writer_id() -> str:
    """A name no other writer on any machine has: the process id to recognise it by, and 64 random bits.

    Among a million writers of one store two share a name with a chance of 3 in 100 million. So nobody looks whether a
    file of that name exists before writing it, which an object store could not do in one step with the writing.
    """
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def locate(path: str | os.PathLike[str], *, create: bool) -> StoreLayout:
    """The layout of an existing store, or of a folder in which one may be created.

    Raises:
        StoreError: nothing is there and `create` is false, it is not a folder, or it holds something else.
    """
    root = Path(path)
    layout = StoreLayout(root)
    if root.exists() and not root.is_dir():
        raise StoreError(f"{root}: a store is a folder, and this is a file; name another path")
    if layout.catalog.exists() or layout.addresses.exists():
        return layout
    if not root.exists():
        if not create:
            raise StoreError(f"{root}: there is no store here; check the path, or start a run that creates it")
        return layout
    foreign = sorted(entry.name for entry in root.iterdir() if not _ours(entry.name))
    if foreign:
        shown = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
        raise StoreError(
            f"{root}: this folder is not a store ({CATALOG} is missing) and already holds {shown}; "
            "name a store, or an empty or new folder to create one in"
        )
    # a store that another process is making has its catalog before it has segments
    if layout.segment_files() and not layout.catalog.exists():
        raise StoreError(
            f"{root}: {CATALOG} is missing and there are segments, so this is a store whose catalog was lost; make "
            f"a new one from them: buffer-engine store recover {root} --into NEW"
        )
    if not create:
        raise StoreError(f"{root}: this folder is empty, not a store ({CATALOG} is missing); check the path")
    return layout


def _ours(name: str) -> bool:
    return name in (SEGMENTS, RUNS, CACHE) or name.startswith((CATALOG, ADDRESSES))


def is_store(root: Path) -> bool:
    """Whether a folder holds a store, or says where one lies."""
    return (root / CATALOG).is_file() or (root / ADDRESSES).is_file()
