"""What a store promises, whatever lies behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import pyarrow as pa
from pydantic import Field

from buffer_engine.config import ComponentConfig

Partition = Literal["train", "eval"]
Durability = Literal["process", "power"]
BatchStatus = Literal["reserved", "prepared", "committed", "released"]


class ReadPolicy(ComponentConfig):
    """Which rows a training batch takes next.

    Groups are taken whole and in order of arrival. A group is ready when every one of its `group_size` rows has a
    final verdict (kept or rejected; a held row makes it wait) and at least one row is kept; only kept rows are taken.
    """

    type: Literal["fifo"] = "fifo"
    rows: int = Field(64, gt=0, description="most rows in a batch; a group that would exceed it waits for the next one")
    min_rows: int = Field(1, gt=0, description="fewest rows worth a step; below it nothing is reserved")
    max_staleness: int | None = Field(
        None, ge=0, description="oldest token version may lag this many versions; null: unbounded"
    )
    max_uses: int = Field(1, gt=0, description="committed batches a row may be trained in")
    incomplete: Literal["wait", "drop", "use"] = Field(
        "wait", description="a group with missing siblings: wait for them, reject its rows, or use what is there"
    )


@dataclass(frozen=True, slots=True)
class AppendReceipt:
    """What an acknowledged append did.

    Attributes:
        version: catalog version at which the rows are visible.
        appended: new rows per table.
        unchanged: rows per table that were already stored with the same content.
    """

    version: int
    appended: Mapping[str, int]
    unchanged: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Rows set aside for one batch.

    Attributes:
        batch_id: names the batch from now on.
        experience_ids: rows in reading order; groups are contiguous.
        expires_at: seconds since the epoch; an unprepared reservation is free again after it.
    """

    batch_id: str
    run_id: str
    experience_ids: tuple[str, ...]
    model_version: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """State of one batch as the catalog knows it."""

    batch_id: str
    run_id: str
    status: BatchStatus
    step: int | None
    rows: int


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing `verify` found wrong.

    Attributes:
        kind: checksum | torn | orphan | conservation | length | missing_row | double_use | catalog.
        where: file, table or key.
        message: what was expected and what was there.
    """

    kind: str
    where: str
    message: str


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """Size of a store: rows and bytes per table, catalog version, durability."""

    path: Path
    schema_version: int
    version: int
    durability: Durability
    rows: Mapping[str, int] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)
    runs: tuple[str, ...] = ()


class ExperienceStore(Protocol):
    """Tables of experiences with durable appends, consistent reads and exactly-once training.

    A *version* is the number of committed catalog transactions. Reads never block writes. All methods may be called
    from several processes at once.
    """

    @property
    def path(self) -> Path:
        """Folder of the store."""
        ...

    def append(self, table: str, rows: pa.Table, *, cursors: Mapping[str, int] | None = None) -> AppendReceipt:
        """Append to one table; see `append_all`."""
        ...

    def append_all(self, tables: Mapping[str, pa.Table], *, cursors: Mapping[str, int] | None = None) -> AppendReceipt:
        """Append to several tables and move named cursors, all or nothing; durable when it returns.

        Columns may come in any order and nullable columns may be missing (null). A key stored before with the same
        content (volatile columns aside) is skipped; so is a repeat inside `tables`. Appending `decisions` moves the
        rollout's status (keep → kept, reject → rejected, hold → held, release → new; mask changes nothing).

        Raises:
            SchemaError: unknown table or column, wrong type, null where none may be, unequal per-token lengths, NaN
                or infinity in a float; names table, key, field and value. Nothing is written.
            KeyConflictError: a key is stored with other content; names the key and the first differing column.
            PartitionError: a task's prompt exists in the other partition, or a rollout's partition is not its task's.
            StoreError: the disk is full or read-only; what was acknowledged before stays.
        """
        ...

    def cursor(self, name: str) -> int:
        """Value of a named cursor, 0 when it was never moved."""
        ...

    def version(self) -> int:
        """Current catalog version."""
        ...

    def scan(
        self,
        table: str,
        *,
        after: int = 0,
        until: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Record batches committed at versions in (after, until], in commit order; zero copy where possible."""
        ...

    def table(self, name: str, *, until: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows of a table as of version `until` (None: now)."""
        ...

    def fetch(self, experience_ids: Sequence[str], *, columns: Sequence[str] | None = None) -> pa.Table:
        """Rollouts by id, in the order asked.

        Raises:
            StoreError: an id is not stored; names it.
        """
        ...

    def narrow(self, table: str, experience_ids: Sequence[str]) -> pa.Table:
        """All rows of `scores` or `decisions` about these rollouts, in commit order."""
        ...

    def runs_of(self, experience_ids: Sequence[str]) -> Mapping[str, str]:
        """Run of every one of these rollouts that is stored; ids that are not are left out."""
        ...

    def rollout_state(
        self, *, run_id: str | None = None, status: str | None = None, until: int | None = None
    ) -> pa.Table:
        """Bookkeeping of rollouts (`schema.ROLLOUT_STATE`) as of version `until` (None: now), in order of arrival."""
        ...

    def batch_state(self, *, until: int | None = None) -> pa.Table:
        """State of batches (`schema.BATCH_STATE`) as of version `until` (None: now)."""
        ...

    def open_run(self, run_id: str) -> AbstractContextManager[None]:
        """Hold the run's name while it runs; the lock falls with the process.

        Raises:
            StoreBusyError: another live process runs it; names its pid.
        """
        ...

    def reserve(
        self,
        policy: ReadPolicy,
        *,
        run_id: str,
        batch_id: str,
        model_version: int,
        lease_seconds: float = 3600.0,
    ) -> Reservation | None:
        """Set aside whole groups of the training partition, or None when fewer than `policy.min_rows` are ready.

        Expired reservations are freed first. Groups older than `max_staleness` are rejected by decisions of operator
        `reader` (reason `stale`) in the same transaction. Rows of other runs in the store are not taken.
        """
        ...

    def prepare_batch(self, reservation: Reservation, *, step: int, batch: pa.Table, rows: pa.Table) -> None:
        """Write the manifest (one `batches` row and its `batch_rows`) durably, before the optimizer step.

        Rows reserved but not in `rows` are freed.

        Raises:
            StoreError: the reservation has expired or was released, or a row is not part of it.
        """
        ...

    def commit_batch(self, batch_id: str, *, step: int, model: pa.Table | None = None) -> None:
        """Count the batch's rows as trained at `step` and append the new `models` row; a repeat is a no-op."""
        ...

    def release(self, batch_id: str) -> None:
        """Free a batch that was not committed; its rows can be reserved again."""
        ...

    def batches(self, run_id: str) -> list[BatchRecord]:
        """The run's batches by step; those not prepared come last."""
        ...

    def verify(self) -> list[Finding]:
        """Check every checksum, length, key, reference and count; an empty list means sound."""
        ...

    def info(self) -> StoreInfo:
        """Rows and bytes."""
        ...

    def close(self) -> None:
        """Release files and locks; acknowledged rows are already durable."""
        ...
