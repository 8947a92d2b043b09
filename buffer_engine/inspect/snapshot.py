"""The bookkeeping of a store as of one version, while others write."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import pyarrow as pa

if TYPE_CHECKING:
    from buffer_engine.store.base import ExperienceStore


@runtime_checkable
class Snapshots(Protocol):
    """A store that can hold its catalog still for one reader, however fast others write."""

    def snapshot(self) -> AbstractContextManager[int]:
        """Everything this thread reads inside the block is as of the version that the block is entered with."""
        ...


def resolve_store(store: ExperienceStore | Path | str) -> ExperienceStore:
    """The store itself, or the one in that folder, opened for reading.

    Raises:
        StoreError: the folder does not exist or holds no store.
    """
    if not isinstance(store, Path | str):
        return store
    from buffer_engine.store.opening import open_store

    return open_store(store, read_only=True)


def states_at(store: ExperienceStore, version: int) -> tuple[pa.Table, pa.Table]:
    """`rollout_state` and `batch_state` as of `version`.

    The bookkeeping of now is what the catalog keeps and is cheap to read. When a transaction has come since `version`,
    the store works the earlier one out from verdicts and the batches' history.
    """
    if isinstance(store, Snapshots):
        with store.snapshot() as now:
            if now == version:
                return store.rollout_state(), store.batch_state()
    else:
        states = store.rollout_state(), store.batch_state()
        if store.version() == version:
            return states
    return store.rollout_state(until=version), store.batch_state(until=version)
