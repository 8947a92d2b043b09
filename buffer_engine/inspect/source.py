"""Where an inspection reads: a store at one version, or tables in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from buffer_engine.errors import StoreError
from buffer_engine.inspect.relations import RELATIONS, STATES
from buffer_engine.inspect.snapshot import states_at

if TYPE_CHECKING:
    from buffer_engine.store.base import ExperienceStore


class Source(Protocol):
    """Tables as of one version, which only `refresh` moves."""

    @property
    def version(self) -> int | None:
        """The version that is shown; None: tables in memory have none."""
        ...

    def refresh(self) -> bool:
        """Show the newest state; whether what was read before still counts and has only grown."""
        ...

    def rows(self, table: str, *, after: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Rows of a stored table made visible at versions in (after, version], in commit order."""
        ...

    def states(self) -> Mapping[str, pa.Table]:
        """The relations of `STATES`."""
        ...

    def payload(self, table: str) -> pa.Table:
        """A stored table whole, zero copy where possible."""
        ...

    @property
    def folder(self) -> Path | None:
        """Where derived files may lie; None: nowhere."""
        ...

    def erased(self) -> Sequence[str]:
        """Rollouts whose payload was taken away, as of now: it is gone for earlier versions too."""
        ...

    def holds(self, *, version: int, experience_id: str | None) -> bool:
        """Whether something read here at `version`, this rollout among it, can still be what is stored."""
        ...

    def close(self) -> None:
        """Let go of what was opened."""
        ...


class TablesSource:
    """Tables in memory."""

    version: int | None = None

    def __init__(self, tables: Mapping[str, pa.Table]) -> None:
        """Show `tables`; a missing one is empty."""
        self._tables = tables

    def refresh(self) -> bool:
        """See `Source.refresh`."""
        return True

    def rows(self, table: str, *, after: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """See `Source.rows`."""
        return iter(self._table(table).select(columns).to_batches() if after == 0 else [])

    def states(self) -> Mapping[str, pa.Table]:
        """See `Source.states`."""
        return {name: self._table(name) for name in STATES}

    def payload(self, table: str) -> pa.Table:
        """See `Source.payload`."""
        return self._table(table)

    def _table(self, table: str) -> pa.Table:
        found = self._tables.get(table)
        return RELATIONS[table].empty_table() if found is None else found

    folder: Path | None = None

    def erased(self) -> Sequence[str]:
        """See `Source.erased`."""
        return self._table("erasures").column("experience_id").to_pylist()

    def holds(self, *, version: int, experience_id: str | None) -> bool:
        """See `Source.holds`; what is in memory does not change."""
        return True

    def close(self) -> None:
        """See `Source.close`; there is nothing to let go of."""


class StoreSource:
    """A store that others may be writing."""

    def __init__(
        self,
        store: ExperienceStore,
        *,
        until: int | None = None,
        vocabulary: pa.Table | None = None,
        owned: bool = False,
    ) -> None:
        """Show `store` as of version `until` (None: the newest at each refresh); an owned one is closed at the end.

        Raises:
            StoreError: `until` lies in the future.
        """
        now = store.version()
        if until is not None and until > now:
            raise StoreError(f"{store.path}: version {until} does not exist yet; the newest is {now}")
        self._store = store
        self._until = until
        self._vocabulary = STATES["vocabulary"].empty_table() if vocabulary is None else vocabulary
        self._owned = owned
        self._version = now if until is None else until
        self._erased = len(self.erased())
        self._damaged = store.quarantine()

    @property
    def version(self) -> int:
        """See `Source.version`."""
        return self._version

    @property
    def folder(self) -> Path | None:
        """See `Source.folder`."""
        return self._store.path

    def refresh(self) -> bool:
        """See `Source.refresh`.

        Rows that were erased, damaged or repaired, or a store put back from a copy, make what was read void.
        """
        before, erased, damaged = self._version, self._erased, self._damaged
        if self._until is None:
            self._version = self._store.version()
        self._erased = len(self.erased())
        self._damaged = self._store.quarantine()
        return self._version >= before and self._erased == erased and self._damaged.equals(damaged)

    def rows(self, table: str, *, after: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """See `Source.rows`."""
        return self._store.scan(table, after=after, until=self._version, columns=columns)

    def states(self) -> Mapping[str, pa.Table]:
        """See `Source.states`."""
        rollouts, batches = states_at(self._store, self._version)
        damaged = self._store.quarantine()
        return {
            "rollout_state": rollouts, "batch_state": batches, "quarantine": damaged, "vocabulary": self._vocabulary,
        }  # fmt: skip

    def payload(self, table: str) -> pa.Table:
        """See `Source.payload`."""
        return self._store.table(table, until=self._version)

    def close(self) -> None:
        """See `Source.close`."""
        if self._owned:
            self._store.close()

    def erased(self) -> Sequence[str]:
        """See `Source.erased`."""
        return self._store.table("erasures", columns=["experience_id"]).column("experience_id").to_pylist()

    def holds(self, *, version: int, experience_id: str | None) -> bool:
        """See `Source.holds`."""
        known = experience_id is None or experience_id in self._store.runs_of([experience_id])
        return known and version <= self._store.version()
