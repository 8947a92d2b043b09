"""A DuckDB database file; one process at a time may have it open."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa

from benchmarks.store.peers import PAYLOAD, ArrowPeer, Padded, padded
from buffer_engine.schema import ROLLOUTS, SCORES


class DuckDBFile(ArrowPeer):
    """Two tables; every append is a transaction."""

    def __init__(self, folder: Path) -> None:
        self._connection = duckdb.connect(str(folder / "rows.duckdb"))
        for spec in (ROLLOUTS, SCORES):
            empty = spec.schema.empty_table()
            self._connection.register("given", empty)
            self._connection.execute(f"CREATE TABLE IF NOT EXISTS {spec.name} AS SELECT * FROM given")
        self._connection.execute("CREATE UNIQUE INDEX IF NOT EXISTS by_id ON rollouts (experience_id)")

    def append(self, prepared: pa.Table) -> None:
        """One INSERT, committed."""
        self._insert("rollouts", prepared)

    def score(self, scores: pa.Table) -> None:
        """One INSERT, committed."""
        self._insert("scores", scores)

    def reward(self, scores: pa.Table) -> None:
        """An UPDATE of a column of the rollouts, which is added when it is missing."""
        self._connection.register("given", scores)
        self._connection.execute("ALTER TABLE rollouts ADD COLUMN IF NOT EXISTS reward DOUBLE")
        self._connection.execute(
            "UPDATE rollouts SET reward = value FROM given WHERE rollouts.experience_id = given.experience_id"
        )

    def batch(self, ids: list[str]) -> Padded:
        """A join with the ids in their order."""
        relation = self._connection.sql(
            f"SELECT {', '.join(PAYLOAD)} FROM rollouts JOIN (SELECT unnest($1) AS experience_id, "
            "generate_subscripts($1, 1) AS place) USING (experience_id) ORDER BY place",
            params=[ids],
        )
        return padded(relation.to_arrow_table())

    def group_by(self) -> list[tuple[object, ...]]:
        """SQL."""
        return self._connection.execute(
            "SELECT model_version, stop_reason, count(*), avg(prompt_length) FROM rollouts GROUP BY ALL"
        ).fetchall()

    def count(self) -> int:
        """SQL."""
        return int(self._connection.execute("SELECT count(*) FROM rollouts").fetchall()[0][0])

    def ids(self) -> list[str]:
        """All ids."""
        return [row[0] for row in self._connection.execute("SELECT experience_id FROM rollouts").fetchall()]

    def compact(self) -> None:
        """Its log into its file."""
        self._connection.execute("CHECKPOINT")

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _insert(self, table: str, rows: pa.Table) -> None:
        self._connection.register("given", rows)
        self._connection.execute(f"INSERT INTO {table} SELECT * FROM given")
