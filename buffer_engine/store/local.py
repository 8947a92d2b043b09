"""The experience store on a local disk: appends, reads, reservations and checks behind one object."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.errors import SchemaError, StoreError
from buffer_engine.schema import BATCH_STATE, ROLLOUT_STATE, ROLLOUTS, SCHEMA_VERSION
from buffer_engine.store import batches, history, index
from buffer_engine.store.addresses import Addresses
from buffer_engine.store.append import Appender, cursor_value
from buffer_engine.store.base import (
    AppendReceipt,
    BatchRecord,
    Durability,
    Finding,
    ReadPolicy,
    Reservation,
    StoreInfo,
)  # fmt: skip
from buffer_engine.store.catalog import Catalog, current_version
from buffer_engine.store.files import LocalFiles, SegmentFiles
from buffer_engine.store.layout import StoreLayout
from buffer_engine.store.objects import CACHE_BYTES
from buffer_engine.store.parts import Parts, find_parts, frame_writer
from buffer_engine.store.reading import (
    SegmentReader,
    frames_by_id,
    frames_of,
    rows_at,
    schema_of,
    wanted_columns,
)  # fmt: skip
from buffer_engine.store.reserve import Reserver
from buffer_engine.store.segments import SEGMENT_BYTES
from buffer_engine.store.validate import table_spec
from buffer_engine.store.verify import Verifier


def open_store(
    path: str | os.PathLike[str],
    *,
    create: bool = True,
    durability: Durability = "power",
    read_only: bool = False,
    catalog: str | None = None,
    segments: str | None = None,
    cache_bytes: int = CACHE_BYTES,
) -> LocalStore:
    """Open the store in a folder.

    Args:
        path: folder of the store; of a shared one, this machine's side of it.
        create: make the folder and an empty store when there is none.
        durability: `power` returns from an append when the rows survive loss of power, `process` when they survive
            the death of any process; the reader sees no difference.
        read_only: for inspection; creates nothing and works while others write.
        catalog: `postgresql://…?schema=NAME`, for a catalog that several machines share; None: as the folder says, and
            in a new folder a file of its own. The folder remembers it without a password.
        segments: `s3://bucket/prefix?…`, for segments on an object store; None: as the folder says, else in it.
        cache_bytes: most bytes of copies of objects below the folder.

    Raises:
        MissingExtraError: the catalog needs psycopg, which is not installed.
        StoreVersionError: the store has another schema version.
        StoreError: nothing is there and nothing may be created, the folder holds something else or is read-only.
    """
    return LocalStore.at(
        find_parts(
            path, Addresses.parse(catalog, segments), create=create, durability=durability, read_only=read_only,
            cache_bytes=cache_bytes,
        ),
        durability=durability,
    )  # fmt: skip


class LocalStore:
    """See `ExperienceStore`. One object may be shared by threads; a forked child opens its own."""

    def __init__(
        self,
        layout: StoreLayout,
        catalog: Catalog,
        *,
        durability: Durability,
        segment_bytes: int = SEGMENT_BYTES,
        files: SegmentFiles | None = None,
    ) -> None:
        self._layout = layout
        self._catalog = catalog
        self._durability: Durability = durability
        self._files = files or LocalFiles(layout)
        self._writer = frame_writer(catalog, self._files, durability=durability, segment_bytes=segment_bytes)
        self._reader = SegmentReader(layout, self._files)
        self._appender = Appender(catalog, self._writer, self._reader)
        self._reserver = Reserver(catalog, self._appender, self._writer, self._reader)

    @classmethod
    def at(cls, parts: Parts, *, durability: Durability) -> Self:
        """The store that is made of these."""
        return cls(parts.layout, parts.catalog, durability=durability, files=parts.files)

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

    def append_all(self, tables: Mapping[str, pa.Table], *, cursors: Mapping[str, int] | None = None) -> AppendReceipt:
        """See `ExperienceStore.append_all`. A row about a rollout that is not stored is a SchemaError."""
        return self._appender.append_all(tables, cursors=cursors)

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
        """See `ExperienceStore.scan`; what is seen is fixed when it is called.

        Raises:
            CorruptSegmentError: a frame is damaged; raised when the iteration reaches it.
        """
        wanted = wanted_columns(table_spec(table), columns)
        frames = frames_of(self._catalog.read(), table, after=after, until=until)
        batches_read = self._reader.batches(frames)
        return batches_read if wanted is None else (batch.select(wanted) for batch in batches_read)

    def table(self, name: str, *, until: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows of a table as of version `until` (None: now)."""
        found = list(self.scan(name, until=until, columns=columns))
        return pa.Table.from_batches(found, schema=schema_of(table_spec(name), columns))

    def fetch(self, experience_ids: Sequence[str], *, columns: Sequence[str] | None = None) -> pa.Table:
        """See `ExperienceStore.fetch`."""
        wanted = wanted_columns(ROLLOUTS, columns)
        connection = self._catalog.read()
        places = {row[0]: (row[1], row[2]) for row in index.places_of(connection, "rollouts", experience_ids)}
        for experience_id in experience_ids:
            if experience_id not in places:
                raise StoreError(f"{self.path}: there is no rollout {experience_id!r}; check the id or the store")
        asked = [places[experience_id] for experience_id in experience_ids]
        frames = frames_by_id(connection, (frame_id for frame_id, _ in asked))
        return rows_at(self._reader, frames, asked, ROLLOUTS, wanted)

    def narrow(self, table: str, experience_ids: Sequence[str]) -> pa.Table:
        """See `ExperienceStore.narrow`; `batch_rows` is not indexed by rollout and cannot be asked for."""
        if table not in ("scores", "decisions"):
            raise SchemaError(f"narrow reads scores or decisions, not {table!r}; use table() or scan()")
        connection = self._catalog.read()
        asked = [row[1:] for row in index.places_of(connection, table, experience_ids)]
        frames = frames_by_id(connection, (frame_id for frame_id, _ in asked))
        return rows_at(self._reader, frames, asked, table_spec(table), None)

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
        names: list[str] = ROLLOUT_STATE.names
        found = self._catalog.read().execute(
            f"SELECT {', '.join(names)} FROM index_rollouts "
            "WHERE (:run IS NULL OR run_id = :run) AND (:status IS NULL OR status = :status) ORDER BY sequence",
            {"run": run_id, "status": status},
        )
        return _table(found.fetchall(), ROLLOUT_STATE)

    def batch_state(self, *, until: int | None = None) -> pa.Table:
        """State of batches, in the order they were reserved."""
        if until is not None:
            latest = history.latest(history.entries(self._catalog.read(), until=until))
            rows = [
                (b.batch_id, b.run_id, b.status, b.step, b.rows, _moment(b.reserved_at), _moment(b.committed_at))
                for b in sorted(latest, key=lambda entry: (entry.reserved_at, entry.batch_id))
            ]
            return _table(rows, BATCH_STATE)
        found = self._catalog.read().execute(
            "SELECT batch_id, run_id, status, step, rows, reserved_at, committed_at FROM batches "
            "ORDER BY reserved_at, batch_id"
        )
        return _table([(*row[:5], _moment(row[5]), _moment(row[6])) for row in found], BATCH_STATE)

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
        return self._reserver.reserve(
            policy, run_id=run_id, batch_id=batch_id, model_version=model_version, lease_seconds=lease_seconds,
            now=time.time(),
        )  # fmt: skip

    def prepare_batch(self, reservation: Reservation, *, step: int, batch: pa.Table, rows: pa.Table) -> None:
        """See `ExperienceStore.prepare_batch`; a repeat with the same content is a no-op."""
        batches.prepare(self._appender, reservation, step=step, batch=batch, rows=rows)

    def commit_batch(self, batch_id: str, *, step: int, model: pa.Table | None = None) -> None:
        """See `ExperienceStore.commit_batch`.

        Raises:
            StoreError: the batch is unknown, not prepared, or was prepared for another step.
        """
        batches.commit(self._catalog, self._appender, batch_id, step=step, model=model)

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
            return Verifier(self._layout, self._catalog, self._files).findings()
        except sqlite3.DatabaseError as error:
            where = self._layout.catalog.name
            return [Finding("catalog", where, f"it cannot be read ({error}), so nothing else could be checked")]

    def info(self) -> StoreInfo:
        """Rows and bytes."""
        connection = self._catalog.read()
        sizes = connection.execute(
            "SELECT tbl, sum(rows), sum(length) FROM frames GROUP BY tbl ORDER BY tbl"
        ).fetchall()
        return StoreInfo(
            path=self.path,
            schema_version=SCHEMA_VERSION,
            version=current_version(connection),
            durability=self._durability,
            rows={table: rows for table, rows, _ in sizes},
            bytes={table: length for table, _, length in sizes},
            runs=tuple(row[0] for row in connection.execute("SELECT run_id FROM runs ORDER BY run_id")),
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


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def _table(rows: Sequence[Sequence[object]], schema: pa.Schema) -> pa.Table:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )
