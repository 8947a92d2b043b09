"""Rows that are stored already, or come twice: left out where they say the same, refused where they do not.

Without `look_up` a narrow table whose keys have an index row each is only sampled: the index's own uniqueness has the
last word. Keys in blocks and those of heavy rows are looked up in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from buffer_engine.errors import KeyConflictError
from buffer_engine.schema import TableSpec
from buffer_engine.store import index
from buffer_engine.store.admission import ABOUT_ROLLOUTS
from buffer_engine.store.connection import Connection
from buffer_engine.store.content import row_hashes
from buffer_engine.store.keyblocks import KeyBlocks
from buffer_engine.store.reading import SegmentReader, frames_by_id, rows_at
from buffer_engine.store.staging import Staged
from buffer_engine.store.validate import row_label

OnConflict = Callable[[KeyConflictError, Staged, int], None]
"""Told of each row (of a part) whose key is taken by other content; raises, or notes it and has the row left out."""


class Repeats:
    """Finds stored rows again, for the appends of one store."""

    def __init__(self, reader: SegmentReader, blocks: KeyBlocks) -> None:
        self._reader = reader
        self._blocks = blocks

    def new_rows(self, connection: Connection, part: Staged, *, look_up: bool, conflict: OnConflict) -> Staged:
        """The rows of `part` that are not stored, or (without `look_up`) are not known to be."""
        if not part.spec.key:
            return part
        known = self._in_blocks(connection, part) if part.blocked else self._in_index(connection, part, look_up)
        if not known:
            return part
        for row, ((frame_id, at), content) in known.items():
            if content != part.contents[row]:
                before = self._reader.batch(frames_by_id(connection, [frame_id])[frame_id]).slice(at, 1)
                now = part.batch.slice(row, 1)
                # an equal row may hash differently only when a later package version added a column
                if differing_columns(part.spec, before, now):
                    conflict(conflict_between(part.spec, before, now, "stored already"), part, row)
        return part.only([row for row in range(part.batch.num_rows) if row not in known])

    def _in_index(self, connection: Connection, part: Staged, look_up: bool) -> dict[int, tuple[index.Place, bytes]]:
        keys = part.keys
        # a repeat of a whole append shows in its first row or its last
        ends = list(dict.fromkeys([keys[0], keys[-1]]))
        if not look_up and part.spec.name in ABOUT_ROLLOUTS and not index.stored(connection, part.spec, ends):
            return {}
        stored = index.stored(connection, part.spec, keys)
        return {row: stored[key] for row, key in enumerate(keys) if key in stored} if stored else {}

    def _in_blocks(self, connection: Connection, part: Staged) -> dict[int, tuple[index.Place, bytes]]:
        found, part.looked_in = self._blocks.find(connection, part.spec.name, part.prints)
        if not found:
            return {}
        places = list(found.values())
        frames = frames_by_id(connection, (frame_id for frame_id, _ in places))
        before = rows_at(self._reader, frames, places, part.spec, None).combine_chunks()
        contents = [one for batch in before.to_batches() for one in row_hashes(part.spec, batch)]
        return {row: (place, content) for (row, place), content in zip(found.items(), contents, strict=True)}


def without_repeats(parts: Sequence[Staged], conflict: OnConflict) -> list[Staged]:
    """The rows without those that say the same as an earlier one; parts left empty are left out."""
    seen: dict[index.Key, tuple[bytes, pa.RecordBatch, int]] = {}
    left: list[Staged] = []
    for part in parts:
        kept: list[int] = []
        for row, (key, content) in enumerate(zip(part.keys, part.contents, strict=True)):
            before = seen.setdefault(key, (content, part.batch, row))
            if before[1] is part.batch and before[2] == row:
                kept.append(row)
            elif before[0] != content:
                one, other = before[1].slice(before[2], 1), part.batch.slice(row, 1)
                conflict(conflict_between(part.spec, one, other, "twice in one append"), part, row)
        if kept:
            left.append(part.only(kept))
    return left


def differing_columns(spec: TableSpec, before: pa.RecordBatch, now: pa.RecordBatch) -> list[str]:
    """Columns, volatile ones aside, in which two one-row batches differ."""
    return [
        name
        for name in spec.schema.names
        if name not in spec.volatile and before.column(name)[0].as_py() != now.column(name)[0].as_py()
    ]


def conflict_between(spec: TableSpec, before: pa.RecordBatch, now: pa.RecordBatch, what: str) -> KeyConflictError:
    """The error for a row whose key is taken by other content; two batches of one row each."""
    names = differing_columns(spec, before, now)
    first = names[0] if names else "content"
    values = [_short(batch.column(first)[0].as_py()) if names else "?" for batch in (before, now)]
    label = row_label(spec, now, 0)
    reason = f"{first} is {values[0]} there and {values[1]} here"
    return KeyConflictError(
        f"{spec.name}: {label} is {what} with other content: {reason}; rows are immutable: give the new row its own "
        "key",
        label=label,
        field=first,
        reason=reason,
    )


def raise_conflict(error: KeyConflictError, part: Staged, row: int) -> None:
    """The usual answer to a conflict: the append is refused as a whole."""
    raise error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "…"
