"""Trinity-RFT's SQLite experience storage, its own code: one pickled experience per row through SQLAlchemy.

It has neither reads by id nor late scores; a batch is its own read (least used first, newest first).
"""

from __future__ import annotations

import sqlite3
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.store.peers import Padded, Unsupported, pad


class TrinitySQL:
    """`SQLExperienceStorage` without Ray."""

    def __init__(self, folder: Path) -> None:
        self._torch: Any = import_module("torch")
        self._experience: Any = import_module("trinity.common.experience").Experience
        config = import_module("trinity.common.config").StorageConfig(
            name="rollouts", path=f"sqlite:///{folder / 'rows.db'}", schema_type="experience", wrap_in_ray=False,
            max_retry_times=20, max_read_timeout=60,
        )  # fmt: skip
        self._storage: Any = import_module("trinity.buffer.storage.sql").SQLExperienceStorage(config)
        self._file = folder / "rows.db"

    def append(self, rows: pa.Table) -> None:
        """Make its objects and write them; making them is part of what a caller pays."""
        self._storage.write([self._object(row) for row in rows.to_pylist()])

    def score(self, scores: pa.Table) -> None:
        """Not there."""
        raise Unsupported("no such operation")

    def batch(self, ids: list[str]) -> Padded:
        """Its own read of as many rows."""
        found = self._storage.read(len(ids))
        blocks: Padded = {}
        for name, attribute in (("token_ids", "tokens"), ("logprobs", "logprobs")):
            arrays = [getattr(one, attribute).numpy() for one in found]
            starts = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int32)
            blocks[name] = pad(np.concatenate(arrays), starts)
        return blocks

    def group_by(self) -> list[tuple[object, ...]]:
        """By model version only: nothing else of it is a column."""
        with sqlite3.connect(self._file) as connection:
            return connection.execute("SELECT model_version, count(*) FROM rollouts GROUP BY 1").fetchall()

    def count(self) -> int:
        """SQL."""
        with sqlite3.connect(self._file) as connection:
            return int(connection.execute("SELECT count(*) FROM rollouts").fetchone()[0])

    def ids(self) -> list[str]:
        """Ids lie inside the pickles."""
        raise Unsupported("ids are not a column")

    def close(self) -> None:
        """Release the engine."""
        self._storage.engine.dispose()

    def _object(self, row: dict[str, Any]) -> Any:
        sampled = row["prompt_length"]
        return self._experience(
            tokens=self._torch.tensor(row["token_ids"], dtype=self._torch.int32),
            logprobs=self._torch.tensor(row["logprobs"][sampled:], dtype=self._torch.float32),
            prompt_length=sampled,
            reward=0.0,
            messages=[{"role": one["role"], "content": one["content"]} for one in row["messages"]],
            info={"model_version": row["model_version"], "experience_id": row["experience_id"]},
        )
