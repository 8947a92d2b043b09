"""A tuned plain SQLite file: token columns as blobs, one row per rollout, WAL mode, synchronous=FULL."""

from __future__ import annotations

import json
import sqlite3
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.store.peers import PAYLOAD, ArrowPeer, Padded, flat, pad
from buffer_engine.schema import ROLLOUTS, SCORES

_PLAIN = [field.name for field in ROLLOUTS.schema if not pa.types.is_nested(field.type) and field.name != "created_at"]
_JSON = ["messages", "token_versions", "sampling"]
_DTYPES = {"token_ids": np.int32, "loss_mask": np.uint8, "logprobs": np.float32}


class SQLiteBlobs(ArrowPeer):
    """What a careful person would write in an afternoon."""

    def __init__(self, folder: Path) -> None:
        self._connection = sqlite3.connect(folder / "rows.sqlite", isolation_level=None, timeout=120)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        columns = ", ".join(f"{name} BLOB" for name in (*_PLAIN, *_JSON, "created_at", *PAYLOAD))
        self._connection.execute(f"CREATE TABLE IF NOT EXISTS rollouts ({columns}, PRIMARY KEY (experience_id))")
        names = ", ".join(SCORES.schema.names)
        self._connection.execute(f"CREATE TABLE IF NOT EXISTS scores ({names}, PRIMARY KEY ({', '.join(SCORES.key)}))")

    def append(self, prepared: pa.Table) -> None:
        """One transaction."""
        rows = prepared
        columns = [rows.column(name).to_pylist() for name in _PLAIN]
        columns += [[json.dumps(value) for value in rows.column(name).to_pylist()] for name in _JSON]
        columns.append(rows.column("created_at").cast(pa.int64()).to_pylist())
        columns += [_blobs(rows.column(name)) for name in PAYLOAD]
        self._insert("rollouts", len(columns), list(zip(*columns, strict=True)))

    def score(self, scores: pa.Table) -> None:
        """One transaction."""
        timeless = scores.set_column(8, "scored_at", scores.column("scored_at").cast(pa.int64()))
        self._insert("scores", timeless.num_columns, list(zip(*(c.to_pylist() for c in timeless.columns), strict=True)))

    def reward(self, scores: pa.Table) -> None:
        """An UPDATE of a column of the rollouts, which is added when it is missing."""
        known = [row[1] for row in self._connection.execute("PRAGMA table_info(rollouts)")]
        if "reward" not in known:
            self._connection.execute("ALTER TABLE rollouts ADD COLUMN reward REAL")
        given = zip(scores.column("value").to_pylist(), scores.column("experience_id").to_pylist(), strict=True)
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany("UPDATE rollouts SET reward = ? WHERE experience_id = ?", given)
        self._connection.execute("COMMIT")

    def batch(self, ids: list[str]) -> Padded:
        """By primary key, in the order asked."""
        found = self._connection.execute(
            f"SELECT {', '.join(PAYLOAD)} FROM json_each(?) k CROSS JOIN rollouts r ON r.experience_id = k.value",
            (json.dumps(ids),),
        ).fetchall()
        blocks: Padded = {}
        for at, name in enumerate(PAYLOAD):
            dtype = np.dtype(_DTYPES[name])
            starts = np.concatenate([[0], np.cumsum([len(row[at]) // dtype.itemsize for row in found])])
            blocks[name] = pad(np.frombuffer(b"".join(row[at] for row in found), dtype=dtype), starts.astype(np.int32))
        return blocks

    def group_by(self) -> list[tuple[object, ...]]:
        """SQL over the whole table: blobs lie on pages of their own."""
        return self._connection.execute(
            "SELECT model_version, stop_reason, count(*), avg(prompt_length) FROM rollouts GROUP BY 1, 2"
        ).fetchall()

    def count(self) -> int:
        """SQL."""
        return int(self._connection.execute("SELECT count(*) FROM rollouts").fetchone()[0])

    def ids(self) -> list[str]:
        """All ids."""
        return [row[0] for row in self._connection.execute("SELECT experience_id FROM rollouts")]

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _insert(self, table: str, width: int, rows: list[tuple[object, ...]]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * width)})", rows)
        self._connection.execute("COMMIT")


def _blobs(column: pa.ChunkedArray) -> list[bytes]:
    values, starts = flat(column)
    return [values[a:b].tobytes() for a, b in pairwise(starts.tolist())]
