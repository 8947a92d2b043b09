"""Delta tables by delta-rs: one Parquet file and one log entry per commit. It does not sync local files."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.schema import PrimitiveType

from benchmarks.store.peers import PAYLOAD, ArrowPeer, Padded, padded


class DeltaFolder(ArrowPeer):
    """One table per folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def append(self, prepared: pa.Table) -> None:
        """One commit."""
        write_deltalake(str(self._folder / "rollouts"), prepared, mode="append")

    def score(self, scores: pa.Table) -> None:
        """One commit to a table of scores."""
        write_deltalake(str(self._folder / "scores"), scores, mode="append")

    def reward(self, scores: pa.Table) -> None:
        """A merge into a column of the rollouts, which is added when it is missing."""
        table = DeltaTable(str(self._folder / "rollouts"))
        if "reward" not in [field.name for field in table.schema().fields]:
            table.alter.add_columns([Field("reward", PrimitiveType("double"))])
        given = scores.select(["experience_id", "value"])
        merge = table.merge(given, "t.experience_id = s.experience_id", source_alias="s", target_alias="t")
        merge.when_matched_update({"reward": "s.value"}).execute()

    def batch(self, ids: list[str]) -> Padded:
        """A filtered scan, then put into the order asked."""
        found = self._dataset().to_table(
            columns=["experience_id", *PAYLOAD], filter=ds.field("experience_id").isin(ids)
        )
        place = {one: at for at, one in enumerate(found.column("experience_id").to_pylist())}
        return padded(found.take([place[one] for one in ids]))

    def group_by(self) -> list[tuple[object, ...]]:
        """DuckDB over the scanned columns."""
        rows = self._dataset().to_table(columns=["model_version", "stop_reason", "prompt_length"])
        with duckdb.connect() as connection:
            connection.register("rows", rows)
            return connection.execute(
                "SELECT model_version, stop_reason, count(*), avg(prompt_length) FROM rows GROUP BY ALL"
            ).fetchall()

    def count(self) -> int:
        """Rows of the newest version."""
        if not (self._folder / "rollouts" / "_delta_log").exists():
            return 0
        return int(self._dataset().count_rows())

    def ids(self) -> list[str]:
        """All ids."""
        return self._dataset().to_table(columns=["experience_id"]).column(0).to_pylist()

    def compact(self) -> None:
        """Few files; those of older versions are removed."""
        table = DeltaTable(str(self._folder / "rollouts"))
        table.optimize.compact()
        table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)

    def close(self) -> None:
        """Nothing is open."""

    def _dataset(self) -> ds.Dataset:
        # The listed files of the newest version; delta-rs' own dataset adapter differs between its releases.
        table = DeltaTable(str(self._folder / "rollouts"))
        return ds.dataset([uri.removeprefix("file://") for uri in table.file_uris()])
