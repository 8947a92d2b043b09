"""Valid rows on their way into one frame."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from buffer_engine.schema import TableSpec
from buffer_engine.store import index, keyblocks
from buffer_engine.store.content import row_hashes


class Staged:
    """Valid rows of one table that become one frame; keys and hashes of keys and content are made once asked for.

    Attributes:
        looked_in: blocks of keys that are known not to hold any of these.
    """

    __slots__ = ("_contents", "_keys", "_prints", "batch", "looked_in", "spec")

    def __init__(self, spec: TableSpec, batch: pa.RecordBatch) -> None:
        self.spec = spec
        self.batch = batch
        self.looked_in: frozenset[keyblocks.BlockName] = frozenset()
        self._keys: list[index.Key] | None = None
        self._prints: keyblocks.Prints | None = None
        self._contents: list[bytes] | None = None

    @property
    def blocked(self) -> bool:
        """Whether the table's keys lie in blocks."""
        return self.spec.name in keyblocks.BLOCKED

    @property
    def keys(self) -> list[index.Key]:
        """Key of every row; empty tuples for a table without key."""
        if self._keys is None:
            self._keys = index.keys_of(self.spec, self.batch)
        return self._keys

    @property
    def prints(self) -> keyblocks.Prints:
        """Hashes of every row's key, of a table whose keys lie in blocks."""
        if self._prints is None:
            self._prints = keyblocks.fingerprints(keyblocks.key_columns(self.spec, self.batch))
        return self._prints

    @property
    def contents(self) -> list[bytes]:
        """Content hash of every row; empty for a table without key."""
        if self._contents is None:
            self._contents = row_hashes(self.spec, self.batch) if self.spec.key else []
        return self._contents

    def only(self, rows: Sequence[int]) -> Staged:
        """The given rows, in order."""
        if len(rows) == self.batch.num_rows:
            return self
        chosen = Staged(self.spec, self.batch.take(pa.array(rows, pa.int64())))
        chosen.looked_in = self.looked_in
        if self._keys is not None:
            chosen._keys = [self._keys[row] for row in rows]
        if self._prints is not None:
            chosen._prints = self._prints.only(rows)
        if self._contents is not None:
            chosen._contents = [self._contents[row] for row in rows]
        return chosen


def has_repeats(parts: Sequence[Staged]) -> bool:
    """Whether a key occurs twice in parts of one table."""
    if not parts or not parts[0].spec.key:
        return False
    if parts[0].blocked:
        return keyblocks.repeated([part.prints for part in parts])
    return len({key for part in parts for key in part.keys}) < sum(part.batch.num_rows for part in parts)
