"""Lance datasets: one fragment per commit. Lance does not sync local files."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.store.peers import PAYLOAD, Padded, padded


class LanceFolder:
    """One dataset per table."""

    def __init__(self, folder: Path) -> None:
        self._lance: Any = import_module("lance")
        self._folder = folder

    def append(self, rows: pa.Table) -> None:
        """One appended fragment."""
        self._lance.write_dataset(rows, str(self._folder / "rollouts.lance"), mode="append")

    def score(self, scores: pa.Table) -> None:
        """One appended fragment of a dataset of scores."""
        self._lance.write_dataset(scores, str(self._folder / "scores.lance"), mode="append")

    def batch(self, ids: list[str]) -> Padded:
        """A filtered scan, then put into the order asked."""
        listed = ", ".join(f"'{one}'" for one in ids)
        found = self._dataset().to_table(
            columns=["experience_id", *PAYLOAD], filter=f"experience_id IN ({listed})"
        )  # fmt: skip
        place = {one: at for at, one in enumerate(found.column("experience_id").to_pylist())}
        return padded(found.take([place[one] for one in ids]))

    def group_by(self) -> list[tuple[object, ...]]:
        """DuckDB over the scanned columns."""
        import duckdb

        rows = self._dataset().to_table(columns=["model_version", "stop_reason", "prompt_length"])
        with duckdb.connect() as connection:
            connection.register("rows", rows)
            return connection.execute(
                "SELECT model_version, stop_reason, count(*), avg(prompt_length) FROM rows GROUP BY ALL"
            ).fetchall()

    def count(self) -> int:
        """Rows of the newest version."""
        return int(self._dataset().count_rows()) if (self._folder / "rollouts.lance").exists() else 0

    def ids(self) -> list[str]:
        """All ids."""
        return self._dataset().to_table(columns=["experience_id"]).column(0).to_pylist()

    def close(self) -> None:
        """Nothing is open."""

    def _dataset(self) -> Any:
        return self._lance.dataset(str(self._folder / "rollouts.lance"))
