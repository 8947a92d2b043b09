"""Lance datasets: one fragment per commit. Lance does not sync local files."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import duckdb
import lance
import pyarrow as pa

from benchmarks.store.peers import PAYLOAD, ArrowPeer, Padded, padded


class LanceFolder(ArrowPeer):
    """One dataset per table."""

    def __init__(self, folder: Path) -> None:
        self._rollouts = str(folder / "rollouts.lance")
        self._scores = str(folder / "scores.lance")
        self._row_of: dict[str, int] = {}
        self._mapped = -1

    def append(self, prepared: pa.Table) -> None:
        """One appended fragment."""
        lance.write_dataset(prepared, self._rollouts, mode="append")

    def score(self, scores: pa.Table) -> None:
        """One appended fragment of a dataset of scores."""
        lance.write_dataset(scores, self._scores, mode="append")

    def reward(self, scores: pa.Table) -> None:
        """A merge into a column of the rollouts, which is added when it is missing."""
        dataset = lance.dataset(self._rollouts)
        if "reward" not in dataset.schema.names:
            dataset.add_columns({"reward": "cast(null as double)"})
        given = scores.select(["experience_id", "value"]).rename_columns(["experience_id", "reward"])
        lance.dataset(self._rollouts).merge_insert("experience_id").when_matched_update_all().execute(given)

    def batch(self, ids: list[str]) -> Padded:
        """A take of row numbers; which id has which is remembered here and read anew when there is a new version."""
        dataset = lance.dataset(self._rollouts)
        if dataset.version != self._mapped:
            known = dataset.to_table(columns=["experience_id"], with_row_id=True)
            names, numbers = known.column("experience_id").to_pylist(), known.column("_rowid").to_pylist()
            self._row_of, self._mapped = dict(zip(names, numbers, strict=True)), dataset.version
        # By row id and not by offset: offsets name other rows after a rewrite.
        return padded(dataset._take_rows([self._row_of[one] for one in ids], columns=list(PAYLOAD)))

    def group_by(self) -> list[tuple[object, ...]]:
        """DuckDB over the scanned columns."""
        rows = lance.dataset(self._rollouts).to_table(columns=["model_version", "stop_reason", "prompt_length"])
        with duckdb.connect() as connection:
            connection.register("rows", rows)
            return connection.execute(
                "SELECT model_version, stop_reason, count(*), avg(prompt_length) FROM rows GROUP BY ALL"
            ).fetchall()

    def count(self) -> int:
        """Rows of the newest version."""
        return int(lance.dataset(self._rollouts).count_rows())

    def ids(self) -> list[str]:
        """All ids."""
        return lance.dataset(self._rollouts).to_table(columns=["experience_id"]).column(0).to_pylist()

    def compact(self) -> None:
        """Fragments into few files; older versions are removed."""
        dataset = lance.dataset(self._rollouts)
        dataset.optimize.compact_files()
        dataset.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)

    def close(self) -> None:
        """Nothing is open."""
