"""The keys of narrow tables as sorted blocks: a few thousand keys cost one catalog row instead of one each.

A block is a blob of three columns of unsigned 64-bit numbers, little-endian, one column after another, sorted by the
first: the key's *head* (48 bits of the hash of the rollout that it is about, then 16 of its tag), its *tag* (a hash of
the whole key), and the row's place. Keys about one rollout are therefore neighbours, and still one search finds one.
Every append adds a block. Whenever `FAN_OUT` blocks of a size have come together they are merged into one of the next,
so that there are only a few for each power of `FAN_OUT`, and a key is looked up by a binary search in each. Blocks are
never changed; a checksum tells a damaged one, and which block a process still remembers.

Two keys are taken for the same when heads and tags are equal. Whoever finds a key this way reads the row before
anything is concluded from it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from buffer_engine.errors import CorruptSegmentError
from buffer_engine.schema import TABLES, TableSpec
from buffer_engine.store.connection import Connection

BLOCKED = ("scores", "decisions")
"""Tables whose keys lie in blocks; the first column of the key is the rollout."""

FAN_OUT = 4
MOST_ROWS = 1 << 22
"""Rows of a block (96 MiB) from which on it is merged no further."""

_SMALLEST = 64
_REMEMBERED_BYTES = 256 << 20
_ROW_BITS = 32
_OF_TAG = np.uint64(0xFFFF)
"""Bits of a head that come from the tag."""

Hashes = npt.NDArray[np.uint64]
BlockName = tuple[int, int]
"""(block id, checksum): no two blocks of a store share both."""


_NONE: frozenset[BlockName] = frozenset()


class KeyTakenError(Exception):
    """A row to be indexed has a key that is indexed already; never leaves the store."""


class Prints(NamedTuple):
    """Heads and tags of keys, uint64 [R]."""

    heads: Hashes
    tags: Hashes

    def only(self, rows: Sequence[int]) -> Prints:
        """The given rows, in order."""
        at = np.array(rows, dtype=np.int64)
        return Prints(self.heads[at], self.tags[at])


@dataclass(frozen=True, slots=True)
class _Block:
    """Keys sorted by head; places are frame id << 32 | row."""

    heads: Hashes
    tags: Hashes
    places: Hashes


def fingerprints(columns: Sequence[pa.Array]) -> Prints:
    """Hashes of keys.

    Args:
        columns: the columns of the key, in its order.
    """
    owners = _hashed(columns[0])
    tags = owners
    for column in columns[1:]:
        if pa.types.is_string(column.type):
            coded = column.dictionary_encode()  # few different names for many rows
            values = _hashed(coded.dictionary)[coded.indices.to_numpy()]
        else:
            values = column.to_numpy().astype(np.int64).view(np.uint64)
        tags = _mixed(tags ^ _mixed(values))
    return Prints((owners & ~_OF_TAG) | (tags & _OF_TAG), tags)


def key_columns(spec: TableSpec, batch: pa.RecordBatch) -> list[pa.Array]:
    """The columns of a batch that make its key."""
    return [batch.column(name) for name in spec.key]


def repeated(parts: Sequence[Prints]) -> bool:
    """Whether a key occurs twice."""
    heads = np.concatenate([part.heads for part in parts])
    alone = np.sort(heads)
    if not np.any(alone[1:] == alone[:-1]):
        return False
    tags = np.concatenate([part.tags for part in parts])
    order = np.lexsort((tags, heads))
    heads, tags = heads[order], tags[order]
    return bool(np.any((heads[1:] == heads[:-1]) & (tags[1:] == tags[:-1])))


def only_about(rows: pa.Table, ids: Sequence[str]) -> pa.Table:
    """Rows found by the hash of their rollout, without those of another rollout of the same hash."""
    wanted = pc.is_in(rows.column("experience_id"), value_set=pa.array(ids, pa.string()))
    return rows if pc.all(wanted).as_py() is not False else rows.filter(wanted)


class KeyBlocks:
    """Looks into a store's blocks and remembers those it has read; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[BlockName, _Block] = {}
        self._bytes = 0

    def find(
        self, connection: Connection, table: str, prints: Prints, *, looked_in: frozenset[BlockName] = _NONE
    ) -> tuple[dict[int, tuple[int, int]], frozenset[BlockName]]:
        """(frame id, row) of those of the keys, by their number, that the table has; and the blocks that say so.

        Args:
            looked_in: blocks in which the caller looked for these keys before and found none.
        """
        names, blocks = self._blocks(connection, table, looked_in)
        order = np.argsort(prints.heads, kind="stable")
        asked = Prints(prints.heads[order], prints.tags[order])
        found: dict[int, tuple[int, int]] = {}
        for block in blocks:
            for at, place in _matches(block, asked):
                found[int(order[at])] = _place(place)
        return found, names

    def about(self, connection: Connection, table: str, ids: Sequence[str]) -> list[tuple[int, int]]:
        """(frame id, row) of a table's rows about these rollouts, in commit order; rows about others may be among them.

        A hash can be shared by two rollouts: see `only_about`.
        """
        owners = np.unique(_hashed(pa.array(ids, pa.string())) & ~_OF_TAG)
        found: list[Hashes] = []
        for block in self._blocks(connection, table, _NONE)[1]:
            first = np.searchsorted(block.heads, owners, side="left")
            counts = np.searchsorted(block.heads, owners | _OF_TAG, side="right") - first
            if counts.any():
                found.append(block.places[_ranges(first, counts)])
        return [_place(place) for place in np.sort(np.concatenate(found)).tolist()] if found else []

    def insert(
        self,
        connection: Connection,
        spec: TableSpec,
        prints: Prints,
        frame_id: int,
        *,
        looked_in: frozenset[BlockName] = _NONE,
    ) -> None:
        """Add the keys of a frame, in the order of its rows, inside the caller's transaction.

        Args:
            looked_in: blocks in which the caller looked for these keys and found none.

        Raises:
            KeyTakenError: a key is there already; the transaction has to be rolled back.
        """
        if self.find(connection, spec.name, prints, looked_in=looked_in)[0]:
            raise KeyTakenError(spec.name)
        order = np.argsort(prints.heads)
        places = (np.uint64(frame_id) << np.uint64(_ROW_BITS)) | order.astype(np.uint64)
        _add(connection, spec.name, _Block(prints.heads[order], prints.tags[order], places))

    def _blocks(
        self, connection: Connection, table: str, looked_in: frozenset[BlockName]
    ) -> tuple[frozenset[BlockName], list[_Block]]:
        """All blocks of a table, and the content of those that are not among `looked_in`."""
        while True:
            names = frozenset(_listed(connection, table))
            blocks = [self._block(connection, name) for name in sorted(names - looked_in)]
            found = [block for block in blocks if block is not None]
            if len(found) == len(blocks):
                return names, found
            # another process merged a block away between the two statements: the new list has what it held

    def _block(self, connection: Connection, name: BlockName) -> _Block | None:
        with self._lock:
            block = self._known.get(name)
        if block is not None:
            return block
        block = _read(connection, name)
        if block is not None:
            with self._lock:
                if name not in self._known:
                    self._known[name] = block
                    self._bytes += 3 * block.heads.nbytes
                while self._bytes > _REMEMBERED_BYTES and len(self._known) > 1:
                    oldest = next(iter(self._known))
                    self._bytes -= 3 * self._known.pop(oldest).heads.nbytes
        return block


def entries(connection: Connection, table: str) -> Iterator[tuple[int, int, int, int]]:
    """(frame id, row, head, tag) of every key of a table, by frame and row; inside a snapshot.

    Raises:
        CorruptSegmentError: a block is damaged.
    """
    blocks = [_there(connection, name) for name in _listed(connection, table)]
    if blocks:
        whole = _merged(blocks)
        order = np.argsort(whole.places)
        columns = (whole.places[order].tolist(), whole.heads[order].tolist(), whole.tags[order].tolist())
        for place, head, tag in zip(*columns, strict=True):
            yield (*_place(place), head, tag)


def take_over(connection: Connection) -> None:
    """Move the keys of schema version 1, one catalog row each, into blocks, inside the caller's transaction."""
    for name in BLOCKED:
        spec = TABLES[name]
        found = connection.execute(f"SELECT frame_id, row, {', '.join(spec.key)} FROM index_{name} ORDER BY 1, 2")
        while rows := list(islice(found, 1 << 17)):
            frames, at, *keys = zip(*rows, strict=True)
            columns = [
                pa.array(values, spec.schema.field(key).type) for key, values in zip(spec.key, keys, strict=True)
            ]
            prints = fingerprints(columns)
            order = np.argsort(prints.heads)
            places = (np.array(frames, dtype=np.uint64) << np.uint64(_ROW_BITS)) | np.array(at, dtype=np.uint64)
            _add(connection, name, _Block(prints.heads[order], prints.tags[order], places[order]))
        connection.execute(f"DROP TABLE index_{name}")


def _add(connection: Connection, table: str, block: _Block) -> None:
    level = _level(len(block.heads))
    while True:
        _write(connection, table, level, block)
        same = connection.execute(
            "SELECT block_id, xxh3 FROM key_blocks WHERE tbl = ? AND level = ?", (table, level)
        ).fetchall()
        if len(same) < FAN_OUT or len(block.heads) >= MOST_ROWS:
            return
        block = _merged([_there(connection, name) for name in same])
        connection.execute("DELETE FROM key_blocks WHERE tbl = ? AND level = ?", (table, level))
        level = max(level + 1, _level(len(block.heads)))


def _level(rows: int) -> int:
    level, size = 0, _SMALLEST
    while rows > size:
        level, size = level + 1, size * FAN_OUT
    return level


def _write(connection: Connection, table: str, level: int, block: _Block) -> None:
    data = np.concatenate([block.heads, block.tags, block.places]).astype("<u8", copy=False).tobytes()
    connection.execute(
        "INSERT INTO key_blocks (tbl, level, rows, xxh3, keys) VALUES (?, ?, ?, ?, ?)",
        (table, level, len(block.heads), _checksum(data), data),
    )


def _listed(connection: Connection, table: str) -> list[BlockName]:
    return connection.execute("SELECT block_id, xxh3 FROM key_blocks WHERE tbl = ?", (table,)).fetchall()


def _there(connection: Connection, name: BlockName) -> _Block:
    """A block that is listed in the transaction that reads it."""
    block = _read(connection, name)
    assert block is not None, name
    return block


def _read(connection: Connection, name: BlockName) -> _Block | None:
    """A block; None when it was merged away meanwhile.

    Raises:
        CorruptSegmentError: its bytes have changed.
    """
    row = connection.execute("SELECT tbl, rows, keys FROM key_blocks WHERE block_id = ? AND xxh3 = ?", name).fetchone()
    if row is None:
        return None
    table, rows, data = row
    if len(data) != 24 * rows or _checksum(data) != name[1]:
        raise CorruptSegmentError(
            f"catalog: block {name[0]} of the keys of {table} has changed since it was written; restore the catalog "
            "from a copy"
        )
    heads, tags, places = np.frombuffer(data, dtype="<u8").reshape(3, rows)
    return _Block(heads, tags, places)


def _checksum(data: bytes) -> int:
    digest = xxhash.xxh3_64_intdigest(data)
    return digest - (1 << 64) if digest >= 1 << 63 else digest


def _merged(blocks: Sequence[_Block]) -> _Block:
    heads, tags, places = (
        np.concatenate([getattr(block, name) for block in blocks]) for name in ("heads", "tags", "places")
    )
    order = np.argsort(heads, kind="stable")  # finds the blocks' own order again, which is quick
    return _Block(heads[order], tags[order], places[order])


def _matches(block: _Block, asked: Prints) -> list[tuple[int, int]]:
    """(number among `asked`, which are sorted by head; place) of those that the block has."""
    found: list[tuple[int, int]] = []
    if len(block.heads) < len(asked.heads):  # the fewer are looked up among the more
        at = np.searchsorted(asked.heads, block.heads)
        rows = np.arange(len(block.heads))
        for number, row in _equal(asked.heads, asked.tags, at, block.heads, block.tags, rows):
            found.append((number, int(block.places[row])))
        return found
    at = np.searchsorted(block.heads, asked.heads)
    numbers = np.arange(len(asked.heads))
    for row, number in _equal(block.heads, block.tags, at, asked.heads, asked.tags, numbers):
        found.append((number, int(block.places[row])))
    return found


def _equal(
    heads: Hashes,
    tags: Hashes,
    at: npt.NDArray[np.int64],
    wanted: Hashes,
    wanted_tags: Hashes,
    rows: npt.NDArray[np.int64],
) -> list[tuple[int, int]]:
    """(place in `heads`, row) where both hashes are equal; equal heads are neighbours from `at` on."""
    found: list[tuple[int, int]] = []
    while len(rows):
        here = at < len(heads)
        here[here] = heads[at[here]] == wanted[rows[here]]
        at, rows = at[here], rows[here]
        same = tags[at] == wanted_tags[rows]
        found += zip(at[same].tolist(), rows[same].tolist(), strict=True)
        at = at + 1
    return found


def _ranges(first: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """first[0], first[0] + 1, … for counts[0] numbers, then the same for the next."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1])) + np.repeat(first - ends + counts, counts)


def _place(place: int) -> tuple[int, int]:
    return place >> _ROW_BITS, place & ((1 << _ROW_BITS) - 1)


def _hashed(texts: pa.Array) -> Hashes:
    digest = xxhash.xxh3_64_intdigest  # xxhash has no call for many texts at once
    return np.fromiter(map(digest, texts.cast(pa.binary()).to_pylist()), dtype=np.uint64, count=len(texts))


def _mixed(values: Hashes) -> Hashes:
    """Every bit of a number spread over all of them (the finalizer of SplitMix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
