"""Valid rows on their way into one frame."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from buffer_engine.schema import TableSpec
from buffer_engine.store import index
from buffer_engine.store.content import row_hashes


class Staged:
    """Valid rows of one table that become one frame, with their keys and, once somebody asks, content hashes."""

    __slots__ = ("_contents", "batch", "keys", "spec")

    def __init__(
        self, spec: TableSpec, batch: pa.RecordBatch, keys: list[index.Key], contents: list[bytes] | None = None
    ) -> None:
        self.spec = spec
        self.batch = batch
        self.keys = keys
        self._contents = contents

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
        batch = self.batch.take(pa.array(rows, pa.int64()))
        contents = None if self._contents is None else [self._contents[row] for row in rows]
        return Staged(self.spec, batch, [self.keys[row] for row in rows], contents)
