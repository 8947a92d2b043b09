"""The store of this package, with both durabilities."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from benchmarks.store.data import decision_rows, manifest_rows
from benchmarks.store.peers import PAYLOAD, ArrowPeer, Padded
from buffer_engine.inspect import Inspection, connect_store
from buffer_engine.store import open_store
from buffer_engine.store.base import Durability, ReadPolicy
from buffer_engine.store.padded import PadBuffers


class Ours(ArrowPeer):
    """`durability="power"`, the default."""

    durability: Durability = "power"

    def __init__(self, folder: Path) -> None:
        self._store = open_store(folder / "store", durability=self.durability)
        self._inspection: Inspection | None = None
        self._buffers = PadBuffers()

    def append(self, prepared: pa.Table) -> None:
        """One append."""
        self._store.append("rollouts", prepared)

    def batch(self, ids: list[str]) -> Padded:
        """Padded arrays in memory that is used again, as a trainer reads; unknown log-probabilities are NaN."""
        return dict(self._store.padded(ids, PAYLOAD, out=self._buffers).columns)

    def score(self, scores: pa.Table) -> None:
        """One append to `scores`."""
        self._store.append("scores", scores)

    def reward(self, scores: pa.Table) -> None:
        """The same append: the reward in use follows from the scores."""
        self.score(scores)

    def group_by(self) -> list[tuple[object, ...]]:
        """DuckDB over the store at its newest version; the connection is kept, the refresh is part of it."""
        if self._inspection is None:
            self._inspection = connect_store(self._store)
        else:
            self._inspection.refresh()
        rows = self._inspection.rows(
            "SELECT model_version, stop_reason, count(*) AS n, avg(prompt_length) AS mean "
            "FROM raw.rollouts GROUP BY ALL"
        )
        return [tuple(row.values()) for row in rows]

    def count(self) -> int:
        """Rows by the catalog."""
        return self._store.info().rows.get("rollouts", 0)

    def ids(self) -> list[str]:
        """All ids."""
        return self._store.table("rollouts", columns=["experience_id"]).column(0).to_pylist()

    def keep(self, ids: list[str]) -> None:
        """One verdict each."""
        self._store.append("decisions", decision_rows(ids))

    def take(self, rows: int, number: int, who: str) -> list[str]:
        """Reserve, write the manifest, commit: all that a step needs."""
        batch_id = f"{who}/{number}"
        policy = ReadPolicy.model_validate({"type": "fifo", "rows": rows})
        found = self._store.reserve(policy, run_id="bench", batch_id=batch_id, model_version=0)
        if found is None:
            return []
        batch, batch_rows = manifest_rows(batch_id, found.experience_ids, step=number)
        self._store.prepare_batch(found, step=number, batch=batch, rows=batch_rows)
        self._store.commit_batch(batch_id, step=number)
        return list(found.experience_ids)

    def compact(self) -> None:
        """All frames into Parquet, the newest too, when the writer has closed its files; the old ones go at once."""
        folder = self._store.path
        self.close()
        self._store, self._inspection = open_store(folder, durability=self.durability), None
        self._store.compact(everything=True, grace_seconds=0)

    def close(self) -> None:
        """Close views and store."""
        if self._inspection is not None:
            self._inspection.close()
        self._store.close()


class OursProcess(Ours):
    """`durability="process"`: nothing is synced, as in peers that do not sync either."""

    durability: Durability = "process"
