"""Appends: validate, recognise repeats, write frames, make them durable, then commit them in one catalog transaction.

Nothing is visible before the transaction and everything is after it. The slow parts (hashing, writing, syncing) happen
outside it, so several writers rarely wait for each other; what was checked before is checked again inside only when
another writer committed in the meantime.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from buffer_engine.errors import KeyConflictError, PartitionError, SchemaError, StoreBusyError
from buffer_engine.schema import TableSpec
from buffer_engine.store import index
from buffer_engine.store.base import AppendReceipt
from buffer_engine.store.catalog import Catalog, current_version, next_version
from buffer_engine.store.content import row_hashes
from buffer_engine.store.reading import SegmentReader, frames_by_id
from buffer_engine.store.segments import FrameRef, SegmentWriter
from buffer_engine.store.validate import conform, row_label, table_spec

_ATTEMPTS = 20
_ABOUT_ROLLOUTS = ("scores", "decisions", "batch_rows")


@dataclass(frozen=True, slots=True)
class Staged:
    """Valid rows of one table that become one frame, with their keys and content hashes."""

    spec: TableSpec
    batch: pa.RecordBatch
    keys: list[index.Key]
    contents: list[bytes]

    def only(self, rows: Sequence[int]) -> Staged:
        """The given rows, in order."""
        if len(rows) == self.batch.num_rows:
            return self
        batch = self.batch.take(pa.array(rows, pa.int64()))
        return Staged(self.spec, batch, [self.keys[row] for row in rows], [self.contents[row] for row in rows])


class Appender:
    """Writes rows of any table of one store."""

    def __init__(self, catalog: Catalog, writer: SegmentWriter, reader: SegmentReader) -> None:
        self._catalog = catalog
        self._writer = writer
        self._reader = reader

    def append_all(
        self,
        tables: Mapping[str, pa.Table],
        *,
        cursors: Mapping[str, int] | None = None,
        inside: Callable[[sqlite3.Connection], None] | None = None,
    ) -> AppendReceipt:
        """See `ExperienceStore.append_all`; `inside` joins the same transaction and may refuse by raising."""
        moved = dict(cursors or {})
        staged = self.stage(tables)
        given = {name: rows.num_rows for name, rows in tables.items()}
        with self._catalog.lock:
            for _ in range(_ATTEMPTS):
                connection = self._catalog.read()
                seen = current_version(connection)
                fresh = self.select_new(connection, staged)
                if not fresh and inside is None and not self._moves(connection, moved):
                    return _receipt(seen, given, fresh)
                frames = self.write(fresh)
                with self._catalog.transaction("append rows") as connection:
                    if current_version(connection) != seen and not _same(fresh, self.select_new(connection, staged)):
                        continue  # another writer stored some of the rows: leave these frames unlisted, begin again
                    version = next_version(connection)
                    self.record(connection, version, fresh, frames)
                    connection.executemany(
                        "INSERT INTO cursors VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                        list(moved.items()),
                    )
                    if inside is not None:
                        inside(connection)
                return _receipt(version, given, fresh)
        raise StoreBusyError(
            f"{self._catalog.layout.root}: other writers stored some of these rows {_ATTEMPTS} times in between; "
            "let one process write a key"
        )

    def stage(self, tables: Mapping[str, pa.Table]) -> list[Staged]:
        """Validate rows and drop repeats among them.

        Raises:
            SchemaError: see `conform`.
            KeyConflictError: one key occurs twice with different content.
        """
        staged: list[Staged] = []
        for name, rows in tables.items():
            spec = table_spec(name)
            seen: dict[index.Key, tuple[bytes, pa.RecordBatch, int]] = {}
            for batch in conform(spec, rows):
                if not spec.key:
                    staged.append(Staged(spec, batch, [], []))
                    continue
                part = Staged(spec, batch, index.keys_of(spec, batch), row_hashes(spec, batch))
                kept: list[int] = []
                for row, (key, content) in enumerate(zip(part.keys, part.contents, strict=True)):
                    before = seen.setdefault(key, (content, batch, row))
                    if before[1] is batch and before[2] == row:
                        kept.append(row)
                    elif before[0] != content:
                        raise _conflict(spec, before[1].slice(before[2], 1), batch.slice(row, 1), "twice in one append")
                if kept:
                    staged.append(part.only(kept))
        return staged

    def select_new(self, connection: sqlite3.Connection, staged: Sequence[Staged]) -> list[Staged]:
        """The rows that are not stored yet, after every check that needs the catalog.

        Raises:
            KeyConflictError, PartitionError, SchemaError: see `ExperienceStore.append_all`.
        """
        fresh: list[Staged] = []
        for part in staged:
            known = index.stored(connection, part.spec, part.keys) if part.spec.key else {}
            if known:
                rows = [
                    row for row, key in enumerate(part.keys) if not self._repeats(connection, part, row, key, known)
                ]
                part = part.only(rows)
            if part.batch.num_rows:
                fresh.append(part)
        _check_partitions(connection, fresh)
        _check_references(connection, fresh)
        return fresh

    def write(self, staged: Sequence[Staged], *, may_roll: bool = True) -> list[FrameRef]:
        """Write the frames and make them durable; they stay invisible until `record` and commit."""
        frames = [self._writer.write(part.spec.name, part.batch, may_roll=may_roll) for part in staged]
        self._writer.sync()
        return frames

    def record(
        self, connection: sqlite3.Connection, version: int, staged: Sequence[Staged], frames: Sequence[FrameRef]
    ) -> None:
        """List frames and rows in the catalog and apply verdicts, inside the caller's transaction."""
        for part, frame in zip(staged, frames, strict=True):
            (frame_id,) = connection.execute("SELECT coalesce(max(frame_id), 0) + 1 FROM frames").fetchone()
            connection.execute(
                "INSERT INTO frames VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (frame_id, frame.table, frame.segment_id, frame.offset, frame.length, frame.rows, version, frame.xxh3),
            )
            index.insert(connection, part.spec, part.batch, part.keys, part.contents, frame_id)
        # after every table is indexed, so that rollouts and verdicts about them may come together in any order
        for part in staged:
            if part.spec.name == "decisions":
                index.apply_verdicts(connection, part.batch)

    def _moves(self, connection: sqlite3.Connection, cursors: Mapping[str, int]) -> bool:
        return any(cursor_value(connection, name) != value for name, value in cursors.items())

    def _repeats(
        self,
        connection: sqlite3.Connection,
        part: Staged,
        row: int,
        key: index.Key,
        known: Mapping[index.Key, tuple[index.Place, bytes]],
    ) -> bool:
        if key not in known:
            return False
        (frame_id, at), content = known[key]
        if content != part.contents[row]:
            before = self._reader.batch(frames_by_id(connection, [frame_id])[frame_id]).slice(at, 1)
            now = part.batch.slice(row, 1)
            # an equal row may hash differently only when a later package version added a column
            if differing_columns(part.spec, before, now):
                raise _conflict(part.spec, before, now, "stored already")
        return True


def cursor_value(connection: sqlite3.Connection, name: str) -> int:
    """Value of a named cursor, 0 when it was never moved."""
    found = connection.execute("SELECT value FROM cursors WHERE name = ?", (name,)).fetchone()
    return 0 if found is None else int(found[0])


def differing_columns(spec: TableSpec, before: pa.RecordBatch, now: pa.RecordBatch) -> list[str]:
    """Columns, volatile ones aside, in which two one-row batches differ."""
    return [
        name
        for name in spec.schema.names
        if name not in spec.volatile and before.column(name)[0].as_py() != now.column(name)[0].as_py()
    ]


def _conflict(spec: TableSpec, before: pa.RecordBatch, now: pa.RecordBatch, what: str) -> KeyConflictError:
    names = differing_columns(spec, before, now)
    first = names[0] if names else "content"
    values = [_short(batch.column(first)[0].as_py()) if names else "?" for batch in (before, now)]
    return KeyConflictError(
        f"{spec.name}: {row_label(spec, now, 0)} is {what} with other content: {first} is {values[0]} there and "
        f"{values[1]} here; rows are immutable: give the new row its own key"
    )


def _check_partitions(connection: sqlite3.Connection, staged: Sequence[Staged]) -> None:
    prompts: dict[str, tuple[str, str]] = {}
    partition_of_task: dict[str, str] = {}
    for part in staged:
        if part.spec.name != "tasks":
            continue
        columns = [part.batch.column(name).to_pylist() for name in ("task_id", "partition", "prompt_hash")]
        for task_id, partition, prompt in zip(*columns, strict=True):
            partition_of_task[task_id] = partition
            other_id, other = prompts.setdefault(prompt, (task_id, partition))
            if other != partition:
                raise _overlap(task_id, partition, other_id, other)
    if prompts:
        listed = index.tasks_with_prompts(connection, list(prompts))
        for other_id, other, prompt in listed:
            task_id, partition = prompts[prompt]
            if other != partition:
                raise _overlap(task_id, partition, other_id, other)
    for part in staged:
        if part.spec.name != "rollouts":
            continue
        columns = [part.batch.column(name).to_pylist() for name in ("experience_id", "task_id", "partition")]
        known = index.partitions_of_tasks(connection, columns[1]) | partition_of_task
        for experience_id, task_id, partition in zip(*columns, strict=True):
            if known.get(task_id, partition) != partition:
                raise PartitionError(
                    f"rollouts: experience_id={experience_id!r} is in partition {partition!r}, but its task "
                    f"{task_id!r} is in {known[task_id]!r}; give the rollout the partition of its task"
                )


def _overlap(task_id: str, partition: str, other_id: str, other: str) -> PartitionError:
    return PartitionError(
        f"tasks: the prompt of task_id={task_id!r} ({partition}) is also that of {other_id!r} ({other}); training and "
        "evaluation prompts may not overlap: remove it from one of the two"
    )


def _check_references(connection: sqlite3.Connection, staged: Sequence[Staged]) -> None:
    arriving = {key[0] for part in staged if part.spec.name == "rollouts" for key in part.keys}
    for part in staged:
        if part.spec.name in _ABOUT_ROLLOUTS:
            about = set(part.batch.column("experience_id").to_pylist()) - arriving
            unknown = index.unknown_rollouts(connection, about)
            if unknown:
                raise SchemaError(
                    f"{part.spec.name}: experience_id={min(unknown)!r} is not a stored rollout "
                    f"({len(unknown)} such id(s)); append the rollout first, or in the same call"
                )


def _same(one: Sequence[Staged], other: Sequence[Staged]) -> bool:
    return [(part.spec.name, part.keys) for part in one] == [(part.spec.name, part.keys) for part in other]


def _receipt(version: int, given: Mapping[str, int], fresh: Sequence[Staged]) -> AppendReceipt:
    appended = dict.fromkeys(given, 0)
    for part in fresh:
        appended[part.spec.name] += part.batch.num_rows
    return AppendReceipt(version, appended, {name: rows - appended[name] for name, rows in given.items()})


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "…"
