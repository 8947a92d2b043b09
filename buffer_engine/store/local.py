"""The experience store on a local disk: appends, reads, reservations and checks behind one object."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.errors import SchemaError, StoreError
from buffer_engine.schema import ROLLOUTS, TABLES
from buffer_engine.store import batches, history, index, states
from buffer_engine.store.append import Appender, cursor_value
from buffer_engine.store.base import (
    AppendReceipt,
    BatchRecord,
    Durability,
    Finding,
    OnInvalid,
    ReadPolicy,
    Reservation,
    StoreInfo,
)  # fmt: skip
from buffer_engine.store.catalog import current_version
from buffer_engine.store.cold import ColdFiles, cold_files
from buffer_engine.store.compact import GRACE_SECONDS, Compaction, Compactor, Progress
from buffer_engine.store.damage import GuardedReader
from buffer_engine.store.erase import Eraser, EraseRule, Erasure
from buffer_engine.store.keyblocks import BLOCKED, KeyBlocks, only_about
from buffer_engine.store.media import MediaStore
from buffer_engine.store.padded import TOKEN_COLUMNS, PackedRows, PadBuffers, PaddedBatch, TokenReader, token_columns
from buffer_engine.store.parts import Parts, frame_writer
from buffer_engine.store.pressure import BackPressure, Gate
from buffer_engine.store.quarantine import Quarantine
from buffer_engine.store.reading import Frame, frames_by_id, frames_of, rows_at, schema_of, wanted_columns
from buffer_engine.store.replica import Replica
from buffer_engine.store.reserve import Reserver
from buffer_engine.store.segments import SEGMENT_BYTES
from buffer_engine.store.sizes import store_info
from buffer_engine.store.validate import table_spec
from buffer_engine.store.verify import Verifier


class LocalStore:
    """See `ExperienceStore`. One object may be shared by threads; a forked child opens its own."""

    def __init__(
        self,
        parts: Parts,
        *,
        durability: Durability,
        back_pressure: BackPressure | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """The store that is made of these parts; see `open_store`."""
        self._parts = parts
        self._layout = parts.layout
        self._catalog = parts.catalog
        self._durability: Durability = durability
        self._files = parts.files
        self._writer = frame_writer(self._catalog, self._files, durability=durability, segment_bytes=segment_bytes)
        self._reader = GuardedReader(self._layout, self._catalog, self._files)
        self._tokens = TokenReader(self._reader)
        self._blocks = KeyBlocks()
        gate = Gate(self._catalog, back_pressure) if back_pressure and not self._catalog.read_only else None
        self._appender = Appender(self._catalog, self._writer, self._reader, self._blocks, gate)
        self._media = MediaStore(parts.media, self._appender)
        self._reserver = Reserver(self._catalog, self._appender, self._writer, self._reader)
        self._quarantine = Quarantine(self._catalog, self._appender, self._writer, self._reader, self._blocks)

    @property
    def path(self) -> Path:
        """Folder of the store."""
        return self._layout.root

    @property
    def migrated_from(self) -> int | None:
        """Schema version that the store had before this object opened it; None when it was current."""
        return self._catalog.migrated_from

    def append(self, table: str, rows: pa.Table, *, cursors: Mapping[str, int] | None = None) -> AppendReceipt:
        """Append to one table; see `append_all`."""
        return self.append_all({table: rows}, cursors=cursors)

    def append_all(
        self,
        tables: Mapping[str, pa.Table],
        *,
        cursors: Mapping[str, int] | None = None,
        on_invalid: OnInvalid = "refuse_all",
    ) -> AppendReceipt:
        """See `ExperienceStore.append_all`. A row about a rollout that is not stored is a SchemaError."""
        return self._quarantine.noting(
            lambda: self._appender.append_all(tables, cursors=cursors, on_invalid=on_invalid)
        )

    def put_media(self, data: bytes | os.PathLike[str], media_type: str, *, name: str | None = None) -> str:
        """See `ExperienceStore.put_media`."""
        return self._media.put(data, media_type, name=name)

    def media(self, media_id: str) -> bytes:
        """See `ExperienceStore.media`."""
        return self._media.get(media_id)

    def cursor(self, name: str) -> int:
        """Value of a named cursor, 0 when it was never moved."""
        return cursor_value(self._catalog.read(), name)

    def version(self) -> int:
        """Current catalog version."""
        return current_version(self._catalog.read())

    def snapshot(self) -> AbstractContextManager[int]:
        """Everything that this thread reads inside the block is as of the version that the block is entered with."""
        return self._catalog.snapshot()

    def scan(
        self,
        table: str,
        *,
        after: int = 0,
        until: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """See `ExperienceStore.scan`; what is seen is fixed when it is called. Damaged frames are left out."""
        wanted = wanted_columns(table_spec(table), columns)
        connection = self._catalog.read()
        frames = frames_of(connection, table, after=after, until=until)
        return self._quarantine.batches(connection, frames, wanted)

    def replica(self) -> Replica:
        """See `Replica`."""
        return Replica(self._catalog, self._reader, self._appender)

    def table(self, name: str, *, until: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows of a table as of version `until` (None: now)."""
        found = list(self.scan(name, until=until, columns=columns))
        return pa.Table.from_batches(found, schema=schema_of(table_spec(name), columns))

    def cold_files(self, table: str, *, until: int | None = None) -> ColdFiles:
        """A table as of version `until` (None: now) as whole Parquet files, and the frames that are in none of them."""
        with self._catalog.snapshot():
            return cold_files(self._catalog.read(), self._files, table_spec(table).name, until)

    def frame_batch(self, frame: Frame, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """The rows of a frame, or some of their columns; see `SegmentReader.batch`."""
        return self._reader.batch(frame, wanted_columns(TABLES[frame.table], columns))

    def fetch(self, experience_ids: Sequence[str], *, columns: Sequence[str] | None = None) -> pa.Table:
        """See `ExperienceStore.fetch`."""
        wanted, (frames, places) = wanted_columns(ROLLOUTS, columns), self._located(experience_ids)
        return self._quarantine.naming(
            experience_ids, places, frames, lambda: rows_at(self._reader, frames, places, ROLLOUTS, wanted)
        )

    def _located(self, experience_ids: Sequence[str]) -> tuple[dict[int, Frame], list[index.Place]]:
        """Frames of rollouts, and the place of each."""
        connection = self._catalog.read()
        places = {row[0]: (row[1], row[2]) for row in index.places_of(connection, experience_ids)}
        for experience_id in experience_ids:
            if experience_id not in places:
                raise StoreError(f"{self.path}: there is no rollout {experience_id!r}; check the id or the store")
        asked = [places[experience_id] for experience_id in experience_ids]
        return frames_by_id(connection, (frame_id for frame_id, _ in asked)), asked

    def padded(
        self,
        experience_ids: Sequence[str],
        columns: Sequence[str] = TOKEN_COLUMNS,
        *,
        length: int | None = None,
        out: PadBuffers | None = None,
    ) -> PaddedBatch:
        """See `TokenReader.padded`."""
        wanted, (frames, places) = token_columns(columns), self._located(experience_ids)
        return self._quarantine.naming(experience_ids, places, frames, lambda: self._tokens.padded(
            experience_ids, places, frames, wanted, length=length, out=out
        ))  # fmt: skip

    def packed(
        self, experience_ids: Sequence[str], columns: Sequence[str] = TOKEN_COLUMNS, *, out: PadBuffers | None = None
    ) -> PackedRows:
        """See `TokenReader.packed`."""
        wanted, (frames, places) = token_columns(columns), self._located(experience_ids)
        return self._quarantine.naming(experience_ids, places, frames, lambda: self._tokens.packed(
            experience_ids, places, frames, wanted, out=out
        ))  # fmt: skip

    def narrow(self, table: str, ids: Sequence[str]) -> pa.Table:
        """See `ExperienceStore.narrow`."""
        spec, connection = table_spec(table), self._catalog.read()
        if table in BLOCKED:
            asked = self._blocks.about(connection, table, ids)
            return only_about(self._quarantine.rows_found(connection, asked, spec), ids)
        if table not in ("tasks", "batches", "batch_rows", "token_stats"):
            raise SchemaError(
                f"narrow does not read {table!r}: its key does not begin with an id to ask by; use table()"
            )
        return self._quarantine.rows_found(connection, index.places_by_key(connection, spec, ids), spec)

    def runs_of(self, experience_ids: Sequence[str]) -> Mapping[str, str]:
        """See `ExperienceStore.runs_of`; a look at the index, whatever the rows weigh."""
        return index.runs_of(self._catalog.read(), experience_ids)

    def rollout_state(
        self, *, run_id: str | None = None, status: str | None = None, until: int | None = None
    ) -> pa.Table:
        """See `ExperienceStore.rollout_state`."""
        if until is not None:
            state = history.rollout_state_at(
                self.rollout_state(run_id=run_id),
                rollouts=self.table("rollouts", until=until, columns=["experience_id"]),
                decisions=self.table("decisions", until=until, columns=["experience_id", "verdict"]),
                batch_rows=self.table("batch_rows", until=until, columns=["batch_id", "experience_id"]),
                batches=history.entries(self._catalog.read(), until=until),
            )
            return state if status is None else state.filter(pc.equal(state.column("status"), status))
        return states.rollout_state(self._catalog.read(), run_id, status)

    def batch_state(self, *, until: int | None = None) -> pa.Table:
        """State of batches, in the order they were reserved."""
        if until is not None:
            return states.batch_state_of(history.latest(history.entries(self._catalog.read(), until=until)))
        return states.batch_state(self._catalog.read())

    def quarantine(self) -> pa.Table:
        """See `ExperienceStore.quarantine`."""
        return states.quarantine(self._catalog.read())

    @contextmanager
    def open_run(self, run_id: str) -> Generator[None]:
        """See `ExperienceStore.open_run`; frees what a dead process of the run had reserved without a manifest.

        Raises:
            StoreBusyError: another live process runs it; names its pid.
        """
        with self._catalog.hold_run(run_id):
            batches.release_unprepared(self._catalog, run_id)
            yield

    def reserve(
        self,
        policy: ReadPolicy,
        *,
        run_id: str,
        batch_id: str,
        model_version: int,
        lease_seconds: float = 3600.0,
    ) -> Reservation | None:
        """See `ExperienceStore.reserve`. A repeat for a batch that the run still holds renews and returns it.

        Raises:
            StoreError: the batch id has a manifest already, or one group alone exceeds `policy.rows`.
        """
        return self._quarantine.reserve_sound(
            lambda: self._reserver.reserve(
                policy, run_id=run_id, batch_id=batch_id, model_version=model_version, lease_seconds=lease_seconds,
                now=time.time(),
            ),
            batch_id, lambda: batches.release(self._catalog, batch_id),
        )  # fmt: skip

    def prepare_batch(self, reservation: Reservation, *, step: int, batch: pa.Table, rows: pa.Table) -> None:
        """See `ExperienceStore.prepare_batch`; a repeat with the same content is a no-op."""
        batches.prepare(self._appender, reservation, step=step, batch=batch, rows=rows)

    def commit_batch(
        self, batch_id: str, *, step: int, model: pa.Table | None = None, token_stats: pa.Table | None = None
    ) -> None:
        """See `ExperienceStore.commit_batch`.

        Raises:
            StoreError: the batch is unknown, not prepared, or was prepared for another step.
        """
        batches.commit(self._catalog, self._appender, batch_id, step=step, model=model, stats=token_stats)

    def release(self, batch_id: str) -> None:
        """See `ExperienceStore.release`; a repeat is a no-op.

        Raises:
            StoreError: the batch is unknown or committed.
        """
        batches.release(self._catalog, batch_id)

    def batches(self, run_id: str) -> list[BatchRecord]:
        """The run's batches by step, released ones included; those not prepared come last."""
        return batches.records(self._catalog.read(), run_id)

    def verify(self) -> list[Finding]:
        """See `ExperienceStore.verify`; reads everything, so it takes as long as reading the store's bytes."""
        try:
            with self._parts.afresh() as parts:
                return Verifier(parts).findings()
        except sqlite3.DatabaseError as error:
            where = self._layout.catalog.name
            return [Finding("catalog", where, f"it cannot be read ({error}), so nothing else could be checked")]

    def recheck(self) -> tuple[list[int], list[int]]:
        """Read every frame again: ids of those put into quarantine now, and of those found sound and taken back."""
        connection = self._catalog.read()
        return self._quarantine.recheck(frame for name in TABLES for frame in frames_of(connection, name))

    def compact(
        self,
        *,
        everything: bool = False,
        grace_seconds: float = GRACE_SECONDS,
        tables: Sequence[str] | None = None,
        max_uses: int = 1,
        leave_files: bool = False,
        progress: Progress | None = None,
    ) -> Compaction:
        """See `Compactor.compact`."""
        if leave_files:
            with self._catalog.lock:
                self._writer.close()
        done = Compactor(self._layout, self._catalog, self._files).compact(
            everything=everything, grace_seconds=grace_seconds, tables=tables, max_uses=max_uses, progress=progress
        )
        self._reader.forget_removed()
        return done

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
        grace_seconds: float = GRACE_SECONDS,
        progress: Progress | None = None,
    ) -> Erasure:
        """See `Eraser.erase`."""
        eraser = Eraser(self._layout, self._catalog, self._files, self._appender)
        done = eraser.erase(
            rule, reason=reason, author=author, dry_run=dry_run, force=force, max_uses=max_uses, replays=replays or {},
            grace_seconds=grace_seconds, progress=progress,
        )  # fmt: skip
        self._reader.forget_removed()
        return done

    def info(self, *, tokens: bool = False) -> StoreInfo:
        """Rows and bytes; with `tokens`, which reads the masks of all rollouts, what a trainable token costs too."""
        with self._catalog.snapshot():
            return store_info(
                self.path, self._catalog.read(), self._files, self._reader, self._durability, tokens=tokens
            )

    def close(self) -> None:
        """Release files and locks; acknowledged rows are already durable."""
        self._writer.close()
        self._reader.close()
        self._catalog.close()

    def __enter__(self) -> Self:
        """The store itself; it is closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()
