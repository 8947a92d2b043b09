"""What a store that can be kept small promises beyond reading and writing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from buffer_engine.store.base import ExperienceStore
from buffer_engine.store.compact import Compaction
from buffer_engine.store.erase import Erasure
from buffer_engine.store.erase_rule import EraseRule


class KeptStore(ExperienceStore, Protocol):
    """A store with compaction and retention."""

    def compact(
        self,
        *,
        everything: bool = False,
        grace_seconds: float = 600.0,
        tables: Sequence[str] | None = None,
        max_uses: int = 1,
        leave_files: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Compaction:
        """Move cold rows into Parquet files and remove old files; see `LocalStore.compact`."""
        ...

    def erase(
        self,
        rule: EraseRule,
        *,
        reason: str,
        author: str,
        dry_run: bool = False,
        force: bool = False,
        max_uses: int = 1,
        replays: Mapping[str, int] | None = None,
        grace_seconds: float = 600.0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Erasure:
        """Take the payload of the rows of a rule away, with a record of it; see `LocalStore.erase`."""
        ...
