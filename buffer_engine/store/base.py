"""What a store promises, whatever lies behind it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self

import pyarrow as pa
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from buffer_engine.config import ComponentConfig

if TYPE_CHECKING:
    from buffer_engine.store.compact import Compaction
    from buffer_engine.store.erase import Erasure
    from buffer_engine.store.erase_rule import EraseRule

Partition = Literal["train", "eval"]
Durability = Literal["process", "power"]
OnInvalid = Literal["refuse_all", "refuse_rows"]
BatchStatus = Literal["reserved", "prepared", "committed", "released"]


PolicyType = Literal["fifo", "newest", "uniform", "prioritized", "stratified", "mixture"]

_USED_BY: Mapping[str, tuple[PolicyType, ...]] = {
    "by": ("prioritized", "stratified"),
    "favor": ("prioritized",),
    "exponent": ("prioritized",),
    "floor": ("prioritized",),
    "unseen": ("prioritized",),
    "importance": ("prioritized",),
    "order": ("stratified", "mixture"),
    "expert_share": ("mixture",),
}
"""Fields that mean something to some policies only."""


class ReadPolicy(ComponentConfig):
    """Which rows a training batch takes next.

    Groups are taken whole; `type` says in which order. A group is ready when every one of its `group_size` rows has a
    final verdict (kept or rejected; a held row makes it wait) and at least one row is kept; only kept rows are taken.
    A batch ends before the first group that does not fit.
    """

    type: PolicyType = Field(
        "fifo",
        description="fifo and newest: by arrival; uniform: any ready group alike; prioritized: by `by`; "
        "stratified: equal shares of tasks or task sets; mixture: rollouts and expert rows at a ratio",
    )
    rows: int = Field(64, gt=0, description="most rows in a batch; a group that would exceed it waits for the next one")
    min_rows: int = Field(1, gt=0, description="fewest rows worth a step; below it nothing is reserved")
    max_staleness: int | None = Field(
        None, ge=0, description="oldest token version may lag this many versions; null: unbounded"
    )
    max_uses: int = Field(1, gt=0, description="committed batches a row may be trained in")
    incomplete: Literal["wait", "drop", "use"] = Field(
        "wait", description="a group with missing siblings: wait for them, reject its rows, or use what is there"
    )
    over_age: Literal["reject", "mask"] = Field(
        "reject",
        description="a group beyond max_staleness: reject it, or train only the tokens that are young enough",
    )
    cooldown_steps: int = Field(
        0, ge=0, description="optimizer steps between two uses of a row; needs max_uses above 1"
    )
    max_tokens: int | None = Field(None, gt=0, description="most tokens in a batch, prompts included; null: unbounded")
    balance: Literal["length"] | None = Field(
        None, description="length: order rows long, short, long, short, so that equal parts of a batch weigh alike"
    )
    samples_per_insert: float | None = Field(
        None, gt=0, description="rows trained per row kept may not exceed this; null: unlimited"
    )
    min_size: int = Field(1, gt=0, description="kept rows before the first batch; needs samples_per_insert")
    seed: int | None = Field(None, ge=0, description="seed of random draws; null: the seed of the run")
    by: str | None = Field(
        None,
        description="prioritized: reward, advantage, staleness or score:NAME; stratified: task or taskset",
    )
    favor: Literal["high", "low"] = Field("high", description="prioritized: which end of `by` is drawn more often")
    exponent: float = Field(0.6, ge=0, le=8, description="prioritized: 0 draws uniformly, 1 in proportion")
    floor: float = Field(0.01, gt=0, description="prioritized, favor high: added to every priority")
    unseen: float = Field(1.0, ge=0, description="prioritized: stands in for a value that a row has not got yet")
    importance: float = Field(0.4, ge=0, le=1, description="prioritized: exponent of the weights that undo the bias")
    order: Literal["fifo", "newest", "uniform"] = Field("fifo", description="stratified, mixture: order inside a part")
    expert_share: float | None = Field(None, gt=0, lt=1, description="mixture: share of imported rows in a batch")

    @model_validator(mode="after")
    def _fits_type(self) -> Self:
        """Fields that `type` does not use must be left alone; those that it needs must be there.

        Raises:
            PydanticCustomError: of type `misfit`; `field` and `fix` in its context say where and what to write.
        """
        for name, types in _USED_BY.items():
            if self.type not in types and getattr(self, name) != type(self).model_fields[name].default:
                fix = f"remove it, or write type: {' or '.join(types)}"
                raise _misfit(name, f"`{name}` means nothing to type {self.type}", fix)
        if self.type == "prioritized" and not is_priority(self.by):
            said = f"type prioritized needs a number of each row to go by, and `by` is {_said(self.by)}"
            raise _misfit("by", said, "write by: reward, advantage, staleness or score:NAME")
        if self.type == "stratified" and self.by not in ("task", "taskset"):
            said = f"type stratified shares a batch between parts, and `by` is {_said(self.by)}"
            raise _misfit("by", said, "write by: task or taskset")
        if self.type == "mixture" and self.expert_share is None:
            raise _misfit("expert_share", "type mixture needs a ratio", "write expert_share, say 0.25")
        if self.expert_share is not None and not 0 < self.expert_rows < self.rows:
            said = f"{self.expert_share:g} of {self.rows} rows are {self.expert_rows} expert rows, which is no mixture"
            raise _misfit("expert_share", said, "write a larger `rows` or another share")
        if self.over_age == "mask" and self.max_staleness is None:
            said = "over_age: mask has to know which tokens are over-age, and max_staleness is null"
            raise _misfit("over_age", said, "write max_staleness")
        if self.cooldown_steps and self.max_uses == 1:
            said = f"a row rests {self.cooldown_steps} steps between two uses, and is used once"
            raise _misfit("cooldown_steps", said, "write max_uses above 1, or remove it")
        if self.min_size > 1 and self.samples_per_insert is None:
            said = f"min_size is {self.min_size}, and nothing limits the rate"
            raise _misfit("min_size", said, "write samples_per_insert, or remove it")
        return self

    @property
    def expert_rows(self) -> int:
        """Places of a batch for expert rows, halves rounded up; 0 unless this is a mixture."""
        return 0 if self.expert_share is None else int(self.rows * self.expert_share + 0.5)

    def seeded(self, seed: int) -> ReadPolicy:
        """This policy with `seed` where it has none of its own."""
        return self if self.seed is not None else self.model_copy(update={"seed": seed})


def is_priority(by: str | None) -> bool:
    """Whether `by` names a number that rows can be prioritized by."""
    return by in ("reward", "advantage", "staleness") or (by is not None and by.startswith("score:") and len(by) > 6)


def _misfit(field: str, said: str, fix: str) -> PydanticCustomError:
    return PydanticCustomError("misfit", "{said}: {fix}", {"field": field, "said": said, "fix": fix})


def _said(value: str | None) -> str:
    return "missing" if value is None else repr(value)


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

    def compact(
        self,
        *,
        everything: bool = False,
        grace_seconds: float = 600.0,
        tables: Sequence[str] | None = None,
        max_uses: int = 1,
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
