"""One zstd Parquet file per commit, made durable before it gets its name; DuckDB and Arrow read them."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from benchmarks.store.peers import PAYLOAD, ArrowPeer, Padded, padded


class ParquetFiles(ArrowPeer):
    """A folder of files per table; what is listed is what is committed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows_of: dict[str, int] = {}
        for table in ("rollouts", "scores"):
            (folder / table).mkdir(exist_ok=True)

    def append(self, prepared: pa.Table) -> None:
        """Write, sync, rename, sync the folder."""
        self._write("rollouts", prepared)

    def score(self, scores: pa.Table) -> None:
        """One more file of scores."""
        self._write("scores", scores)

    def batch(self, ids: list[str]) -> Padded:
        """A filtered scan, then put into the order asked."""
        found = ds.dataset(self._folder / "rollouts").to_table(
            columns=["experience_id", *PAYLOAD], filter=ds.field("experience_id").isin(ids)
        )
        place = {one: at for at, one in enumerate(found.column("experience_id").to_pylist())}
        return padded(found.take([place[one] for one in ids]))

    def group_by(self) -> list[tuple[object, ...]]:
        """DuckDB over the files."""
        with duckdb.connect() as connection:
            return connection.execute(
                "SELECT model_version, stop_reason, count(*), avg(prompt_length) FROM read_parquet(?) GROUP BY ALL",
                [str(self._folder / "rollouts" / "*.parquet")],
            ).fetchall()

    def count(self) -> int:
        """Rows by the footers of files not seen before."""
        for path in (self._folder / "rollouts").glob("*.parquet"):
            if path.name not in self._rows_of:
                self._rows_of[path.name] = pq.read_metadata(path).num_rows
        return sum(self._rows_of.values())

    def ids(self) -> list[str]:
        """All ids."""
        return ds.dataset(self._folder / "rollouts").to_table(columns=["experience_id"]).column(0).to_pylist()

    def close(self) -> None:
        """Nothing is open."""

    def _write(self, table: str, rows: pa.Table) -> None:
        folder = self._folder / table
        path = folder / f"{uuid4().hex}.tmp"
        with path.open("wb") as file:
            pq.write_table(rows, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        path.rename(path.with_suffix(".parquet"))
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
