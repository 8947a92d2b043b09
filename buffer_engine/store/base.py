"""What a store promises, whatever lies behind it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import pyarrow as pa

from buffer_engine.store.read_policy import PolicyType as PolicyType  # with the two below, imported from here by others
from buffer_engine.store.read_policy import ReadPolicy as ReadPolicy
from buffer_engine.store.read_policy import is_priority as is_priority

Partition = Literal["train", "eval"]
Durability = Literal["process", "power"]
OnInvalid = Literal["refuse_all", "refuse_rows"]
BatchStatus = Literal["reserved", "prepared", "committed", "released"]


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row that an append did not take.

    Attributes:
        table: its table.
        key: its key as messages write it (`experience_id='x1'`), or its number in what was given (`row 3`).
        field: the column that is wrong.
        reason: what is wrong with it, with the value.
    """

    table: str
    key: str
    field: str
    reason: str


@dataclass(frozen=True, slots=True)
class AppendReceipt:
    """What an acknowledged append did.

    Attributes:
        version: catalog version at which the rows are visible.
        appended: new rows per table.
        unchanged: rows per table that were already stored with the same content.
        refused: rows that were left out; only with `on_invalid="refuse_rows"`.
    """

    version: int
    appended: Mapping[str, int]
    unchanged: Mapping[str, int]
    refused: tuple[RefusedRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Reservation:
    """Rows set aside for one batch.

    Attributes:
        batch_id: names the batch from now on.
        experience_ids: rows in reading order; groups are contiguous unless the policy balances lengths.
        expires_at: seconds since the epoch; an unprepared reservation is free again after it.
        weights: importance weight of each row, largest 1; empty when every row counts 1.
    """

    batch_id: str
    run_id: str
    experience_ids: tuple[str, ...]
    model_version: int
    expires_at: float
    weights: tuple[float, ...] = ()

    def weight_of(self) -> dict[str, float]:
        """Weight in the loss of each row."""
        weights = self.weights or (1.0,) * len(self.experience_ids)
        return dict(zip(self.experience_ids, weights, strict=True))


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
        kind: checksum | torn | orphan | conservation | length | missing_row | missing_media | double_use | catalog |
            quarantine.
        where: file, table or key.
        message: what was expected and what was there.
    """

    kind: str
    where: str
    message: str


@dataclass(frozen=True, slots=True)
class QuarantinedFrame:
    """A damaged record batch that reads go on without.

    Attributes:
        found_at: seconds since the epoch.
        message: what is wrong with it.
    """

    frame_id: int
    table: str
    segment: str
    offset: int
    rows: int
    found_at: float
    message: str


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """Size of a store: rows and bytes per table, catalog version, durability, frames in quarantine.

    Attributes:
        bytes: of the rows of each table where they lie now, Parquet files included.
        cold_bytes: of that, bytes of Parquet files.
        retired_bytes: room on disk of files that no row lies in any more and that a later compaction removes.
        trainable_tokens: tokens of readable rollouts that may train; None: not counted.
    """

    path: Path
    schema_version: int
    version: int
    durability: Durability
    rows: Mapping[str, int] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)
    runs: tuple[str, ...] = ()
    quarantined: tuple[QuarantinedFrame, ...] = ()
    cold_bytes: Mapping[str, int] = field(default_factory=dict)
    retired_bytes: int = 0
    trainable_tokens: int | None = None

    @property
    def bytes_per_row(self) -> float | None:
        """Bytes of `rollouts` per rollout; None: there is none."""
        rows = self.rows.get("rollouts", 0)
        return self.bytes["rollouts"] / rows if rows else None

    @property
    def bytes_per_trainable_token(self) -> float | None:
        """Bytes of `rollouts` per token that may train; None: there is none, or they were not counted."""
        return self.bytes["rollouts"] / self.trainable_tokens if self.trainable_tokens else None


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

    def append_all(
        self,
        tables: Mapping[str, pa.Table],
        *,
        cursors: Mapping[str, int] | None = None,
        on_invalid: OnInvalid = "refuse_all",
    ) -> AppendReceipt:
        """Append to several tables and move named cursors, all or nothing; durable when it returns.

        Columns may come in any order and nullable columns may be missing (null). A key stored before with the same
        content (volatile columns aside) is skipped; so is a repeat inside `tables`. Appending `decisions` moves the
        rollout's status (keep → kept, reject → rejected, hold → held, release → new; mask changes nothing).

        Args:
            on_invalid: `refuse_all` raises for the first bad row and stores nothing. `refuse_rows` leaves bad rows out
                (a value or length that does not fit, a key that is taken by other content, a rollout that is not
                stored), names each in the receipt and in `events` (kind `refused_row`), and stores the others. What
                is not about single rows is raised all the same.

        Raises:
            SchemaError: unknown table or column, wrong type, null where none may be, unequal per-token lengths, NaN
                or infinity in a float, a `sha256:` reference to media that are not stored; names table, key, field and
                value. Nothing is written.
            KeyConflictError: a key is stored with other content; names the key and the first differing column.
            PartitionError: a task's prompt exists in the other partition, or a rollout's partition is not its task's.
            StoreError: the disk is full or read-only; what was acknowledged before stays.
        """
        ...

    def put_media(self, data: bytes | os.PathLike[str], media_type: str, *, name: str | None = None) -> str:
        """Keep an attachment, once however often it is put; durable when it returns.

        Args:
            data: the bytes, or a file that has them.
            media_type: such as `image/png`.
            name: file name to remember; None: that of the file, if it is one.
        Returns:
            The id, sha256 of the bytes in hexadecimal. A message refers to it as `sha256:<id>` in its `media`.
        Raises:
            SchemaError: `media_type` is none.
            KeyConflictError: the same bytes are stored under another media type.
            StoreError: the disk is full or read-only, or the file cannot be read.
        """
        ...

    def media(self, media_id: str) -> bytes:
        """The bytes of an attachment, checked against the id, which may come with `sha256:` before it.

        Raises:
            StoreError: there is none.
            CorruptSegmentError: the bytes are not those that were stored.
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
            CorruptSegmentError: a row lies in a damaged frame; names both.
        """
        ...

    def narrow(self, table: str, ids: Sequence[str]) -> pa.Table:
        """Rows with one of these ids in the first column of their key, in commit order; costs what they weigh.

        `scores` and `decisions` are asked by rollout, `tasks` by task, `batches`, `batch_rows` and `token_stats` by
        batch.

        Raises:
            SchemaError: the table is none of these.
        """
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

    def quarantine(self) -> pa.Table:
        """Damaged record batches that reads go on without (`schema.QUARANTINE`), in the order of commit."""
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
        `reader` (reason `stale`) in the same transaction, or with `over_age: mask` their rows that still have young
        tokens are taken with decisions of verdict `mask` (reason `over_age`). Rows of other runs are not taken.
        """
        ...

    def prepare_batch(self, reservation: Reservation, *, step: int, batch: pa.Table, rows: pa.Table) -> None:
        """Write the manifest (one `batches` row and its `batch_rows`) durably, before the optimizer step.

        Rows reserved but not in `rows` are freed.

        Raises:
            StoreError: the reservation has expired or was released, or a row is not part of it.
        """
        ...

    def commit_batch(
        self, batch_id: str, *, step: int, model: pa.Table | None = None, token_stats: pa.Table | None = None
    ) -> None:
        """Count the batch's rows as trained at `step`, append the new `models` row and what the step saw at its tokens.

        One transaction; a repeat is a no-op, whatever it brings.
        """
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
