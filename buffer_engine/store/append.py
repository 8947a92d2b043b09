"""Appends: validate, recognise repeats, write frames, make them durable, then commit them in one catalog transaction.

Nothing is visible before the transaction and everything is after it. The slow parts (hashing, writing, syncing) happen
outside it, so several writers rarely wait for each other. Whether a key is new is decided by the index's own uniqueness
inside the transaction: rows are first taken to be new unless a look at the catalog says otherwise, and a collision
begins the append again with every key looked up. The disk works on the frames while their rows are hashed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

import pyarrow as pa

from buffer_engine.errors import BufferEngineError, StoreBusyError
from buffer_engine.store import index
from buffer_engine.store.admission import check_partitions, check_references
from buffer_engine.store.base import AppendReceipt, OnInvalid
from buffer_engine.store.catalog import Catalog, current_version, next_version
from buffer_engine.store.connection import Connection
from buffer_engine.store.grouping import Queue, Request
from buffer_engine.store.keyblocks import KeyBlocks
from buffer_engine.store.pressure import Gate
from buffer_engine.store.reading import SegmentReader
from buffer_engine.store.refusal import Refusals, run_of
from buffer_engine.store.repeats import Repeats, raise_conflict, without_repeats
from buffer_engine.store.segments import FrameRef, FrameWriter
from buffer_engine.store.staging import Staged, has_repeats
from buffer_engine.store.validate import conform, table_spec

_ATTEMPTS = 20
_MOVE_CURSOR = "INSERT INTO cursors VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"


class Appender:
    """Writes rows of any table of one store."""

    def __init__(
        self,
        catalog: Catalog,
        writer: FrameWriter,
        reader: SegmentReader,
        blocks: KeyBlocks,
        gate: Gate | None = None,
    ) -> None:
        self._catalog = catalog
        self._gate = gate
        self._writer = writer
        self._blocks = blocks
        self._repeats = Repeats(reader, blocks)
        self._queue = Queue(catalog.lock)

    def append_all(
        self,
        tables: Mapping[str, pa.Table],
        *,
        cursors: Mapping[str, int] | None = None,
        on_invalid: OnInvalid = "refuse_all",
        inside: Callable[[Connection], None] | None = None,
    ) -> AppendReceipt:
        """See `ExperienceStore.append_all`; `inside` joins the same transaction and may refuse by raising."""
        if self._gate is not None:
            self._gate.wait(tables)
        given = {name: rows.num_rows for name, rows in tables.items()}
        refusals = Refusals() if on_invalid == "refuse_rows" else None
        run_id = run_of(list(tables.values())) if refusals else ""
        request = Request(self.stage(tables, refusals), dict(cursors or {}), given, run_id, refusals)
        if inside is None:
            return self._queue.submit(request, self._serve)
        with self._catalog.lock:
            return self._append(request, inside)

    def _serve(self, requests: Sequence[Request]) -> None:
        """Answer every request: together where that goes well, else each on its own."""
        if len(requests) > 1 and self._append_together(requests):
            return
        for request in requests:
            try:
                request.receipt = self._append(request, None)
            except Exception as failure:  # noqa: BLE001 - raised again in the thread that asked
                request.failure = failure

    def _append(self, request: Request, inside: Callable[[Connection], None] | None) -> AppendReceipt:
        look_up = False
        for _ in range(_ATTEMPTS):
            with self._newest(look_up=look_up) as connection:
                seen = current_version(connection)
                fresh = self._select(connection, request.staged, look_up=look_up, refusals=request.refusals)
                noted = request.refusals.events(request.run_id) if request.refusals else None
                if not fresh and not noted and inside is None and not self._moves(connection, request.moved):
                    return _receipt(seen, request, fresh)
            written = [*fresh, noted] if noted else fresh
            frames = self._write_and_hash(written)
            try:
                version = self._commit(written, frames, [request], seen, inside)
            except index.KeyTakenError:
                look_up = True  # some rows are stored: these frames stay unlisted, and every key is looked up
                continue
            return _receipt(version, request, fresh)
        raise StoreBusyError(
            f"{self._catalog.layout.root}: other writers stored some of these rows {_ATTEMPTS} times in between; "
            "let one process write a key"
        )

    def _append_together(self, requests: Sequence[Request]) -> bool:
        """One sync and one transaction for all; False, and nothing is stored, when any of them needs a closer look."""
        keys = [(part.spec.name, key) for one in requests for part in one.staged for key in part.keys]
        # a prompt may be in two requests under two partitions, which only one after the other shows
        if len(set(keys)) < len(keys) or any(part.spec.name == "tasks" for one in requests for part in one.staged):
            return False
        if any(one.refusals for one in requests):
            return False
        try:
            with self._newest(look_up=False) as connection:
                version = seen = current_version(connection)
                fresh = [self._select(connection, one.staged, look_up=False) for one in requests]
                moving = [one for one in requests if self._moves(connection, one.moved)]
            every = [part for parts in fresh for part in parts]
            if every or moving:
                version = self._commit(every, self._write_and_hash(every), requests, seen, None)
        except (BufferEngineError, index.KeyTakenError):
            return False  # done one by one, the request at fault is refused and no other
        for request, parts in zip(requests, fresh, strict=True):
            request.receipt = _receipt(version, request, parts)
        return True

    @contextmanager
    def _newest(self, *, look_up: bool) -> Generator[Connection]:
        """A connection that sees the newest version; with `look_up`, which follows a collision, nobody else commits."""
        connection = self._catalog.read()
        if look_up or connection.in_transaction:  # a snapshot of this thread shows what was
            with self._catalog.transaction("look up rows") as connection:
                yield connection
        else:
            yield connection

    def _commit(
        self,
        fresh: Sequence[Staged],
        frames: Sequence[FrameRef],
        requests: Sequence[Request],
        seen: int,
        inside: Callable[[Connection], None] | None,
    ) -> int:
        complete = False
        try:
            with self._catalog.transaction("append rows") as connection:
                if current_version(connection) != seen:  # another process committed since the checks
                    check_partitions(connection, fresh)
                    check_references(connection, fresh)
                version = next_version(connection)
                self.record(connection, version, fresh, frames)
                for request in requests:
                    if request.moved:
                        connection.executemany(_MOVE_CURSOR, list(request.moved.items()))
                if inside is not None:
                    inside(connection)
                complete = True
        except Exception:
            if not complete:  # nobody asked for the commit, so it was rolled back for certain
                self._writer.abandon(frames)
            raise
        return version

    def stage(self, tables: Mapping[str, pa.Table], refusals: Refusals | None = None) -> list[Staged]:
        """Validate rows and drop repeats among them; with `refusals` bad rows too.

        Raises:
            SchemaError: see `conform`.
            KeyConflictError: one key occurs twice with different content.
        """
        staged: list[Staged] = []
        for name, rows in tables.items():
            spec = table_spec(name)
            batches = refusals.fitting(spec, rows) if refusals else conform(spec, rows)
            parts = [Staged(spec, batch) for batch in batches]
            if has_repeats(parts):
                parts = without_repeats(parts, refusals.twice if refusals else raise_conflict)
            staged += parts
        return staged

    def select_new(self, connection: Connection, staged: Sequence[Staged]) -> list[Staged]:
        """The rows that are not stored yet, after every check that needs the catalog.

        Raises:
            KeyConflictError, PartitionError, SchemaError: see `ExperienceStore.append_all`.
        """
        return self._select(connection, staged, look_up=True)

    def _select(
        self,
        connection: Connection,
        staged: Sequence[Staged],
        *,
        look_up: bool,
        refusals: Refusals | None = None,
    ) -> list[Staged]:
        """The rows that are not stored, or (without `look_up`) are not known to be: `index.insert` has the last word.

        Heavy rows are looked up in any case, so that a repeat does not fill the disk with frames that nobody lists.
        """
        fresh: list[Staged] = []
        if refusals is not None:
            refusals.begin()
        conflict = refusals.conflict if refusals else raise_conflict
        for part in staged:
            part = self._repeats.new_rows(connection, part, look_up=look_up, conflict=conflict)
            if part.batch.num_rows:
                fresh.append(part)
        if refusals is not None:
            fresh = refusals.without_dangling(connection, fresh)
        check_partitions(connection, fresh)
        check_references(connection, fresh)
        return fresh

    def write(self, staged: Sequence[Staged], *, may_roll: bool = True) -> list[FrameRef]:
        """Write the frames and make them durable; they stay invisible until `record` and commit."""
        frames = [self._writer.write(part.spec.name, part.batch, may_roll=may_roll) for part in staged]
        self._writer.sync()
        return frames

    def _write_and_hash(self, staged: Sequence[Staged]) -> list[FrameRef]:
        """`write`, with the content hashes made while the disk takes the frames in."""
        frames = [self._writer.write(part.spec.name, part.batch) for part in staged]
        self._writer.start_sync()
        for part in staged:
            _ = part.prints if part.blocked else part.contents
        self._writer.sync()
        return frames

    def record(
        self, connection: Connection, version: int, staged: Sequence[Staged], frames: Sequence[FrameRef]
    ) -> None:
        """List frames and rows in the catalog and apply verdicts, inside the caller's transaction."""
        for part, frame in zip(staged, self._writer.listed(connection, frames), strict=True):
            (frame_id,) = connection.execute("SELECT coalesce(max(frame_id), 0) + 1 FROM frames").fetchone()
            connection.execute(
                "INSERT INTO frames VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (frame_id, frame.table, frame.segment_id, frame.offset, frame.length, frame.rows, version, frame.xxh3),
            )
            if part.blocked:
                self._blocks.insert(connection, part.spec, part.prints, frame_id, looked_in=part.looked_in)
            else:
                index.insert(connection, part.spec, part.batch, part.keys, part.contents, frame_id)
        # after every table is indexed, so that rollouts and verdicts about them may come together in any order
        for part in staged:
            if part.spec.name == "decisions":
                index.apply_verdicts(connection, part.batch)

    def _moves(self, connection: Connection, cursors: Mapping[str, int]) -> bool:
        return any(cursor_value(connection, name) != value for name, value in cursors.items())


def cursor_value(connection: Connection, name: str) -> int:
    """Value of a named cursor, 0 when it was never moved."""
    found = connection.execute("SELECT value FROM cursors WHERE name = ?", (name,)).fetchone()
    return 0 if found is None else int(found[0])


def _receipt(version: int, request: Request, fresh: Sequence[Staged]) -> AppendReceipt:
    appended = dict.fromkeys(request.given, 0)
    for part in fresh:
        appended[part.spec.name] += part.batch.num_rows
    refused = request.refusals.rows if request.refusals else ()
    unchanged = {name: rows - appended[name] for name, rows in request.given.items()}
    for one in refused:
        unchanged[one.table] -= 1
    return AppendReceipt(version, appended, unchanged, refused)
