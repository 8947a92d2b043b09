"""All tables of a store at one catalog version, while others write."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import pyarrow as pa

from buffer_engine.errors import StoreBusyError, StoreError
from buffer_engine.schema import TABLES

if TYPE_CHECKING:
    from buffer_engine.store.base import ExperienceStore

PATIENCE_SECONDS = 20.0
"""How long to look for a moment in which no transaction falls between two reads of the bookkeeping."""


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
    from buffer_engine.store.local import open_store

    return open_store(store, read_only=True)


def read_tables(store: ExperienceStore, *, until: int | None = None) -> tuple[dict[str, pa.Table], int]:
    """Every table, `rollout_state` and `batch_state` as of one version, and that version.

    The bookkeeping of now is read first, again when a transaction came in between, and then the tables as of the
    version that it belongs to. For an earlier version the store works it out from verdicts and the batches' history.

    Raises:
        StoreError: `until` lies in the future.
        StoreBusyError: transactions kept coming for `PATIENCE_SECONDS`.
    """
    now, rollout_state, batch_state = _bookkeeping(store)
    if until is not None and until > now:
        raise StoreError(f"{store.path}: version {until} does not exist yet; the newest is {now}")
    version = now if until is None else until
    tables = {name: store.table(name, until=version) for name in TABLES}
    if version < now:
        rollout_state, batch_state = store.rollout_state(until=version), store.batch_state(until=version)
    # last: what the reads above met is in it
    state = {"rollout_state": rollout_state, "batch_state": batch_state, "quarantine": store.quarantine()}
    return {**tables, **state}, version


def _bookkeeping(store: ExperienceStore) -> tuple[int, pa.Table, pa.Table]:
    if isinstance(store, Snapshots):
        with store.snapshot() as version:
            return version, store.rollout_state(), store.batch_state()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        before = store.version()
        rollout_state, batch_state = store.rollout_state(), store.batch_state()
        if store.version() == before:
            return before, rollout_state, batch_state
        if time.monotonic() > deadline:
            raise StoreBusyError(
                f"{store.path}: transactions kept coming for {PATIENCE_SECONDS:g} s, so that no moment could be read "
                "as a whole; try again, or ask for an earlier version"
            )
