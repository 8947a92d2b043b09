"""Back-pressure: an append of rollouts waits while as many as the store may hold are still to be trained.

Waiting are the run's training rows that are new, held or kept and that no committed batch has used, reserved ones
included. They are counted before rows are written, in no transaction, so that whoever judges or trains goes on
meanwhile; appends that are let in at the same moment may go past the bound together. Nothing is ever dropped.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.errors import StoreError, StoreFullError
from buffer_engine.store.catalog import Catalog
from buffer_engine.store.connection import Connection

_LOOKS_PER_SECOND = 50
_WAITING = "uses = 0 AND status IN ('new', 'held', 'kept')"
_INDEX = f"CREATE INDEX IF NOT EXISTS rollouts_waiting ON index_rollouts (run_id, partition) WHERE {_WAITING}"


@dataclass(frozen=True, slots=True)
class BackPressure:
    """How many rollouts of a run may wait, and how long an append waits for room.

    Attributes:
        rows: an append of training rollouts begins only while fewer than this wait. One that begins is stored whole,
            so the bound may be passed by the size of the appends under way.
        seconds: longest wait; then StoreFullError, and nothing is stored.
    """

    rows: int
    seconds: float

    def __post_init__(self) -> None:
        """Refuse bounds that let nothing in.

        Raises:
            StoreError: `rows` is less than 1 or `seconds` is negative.
        """
        if self.rows < 1 or self.seconds < 0:
            raise StoreError(
                f"back-pressure of {self.rows} rows and {self.seconds} seconds lets nothing in: give at least 1 row "
                "and 0 seconds"
            )


class Gate:
    """Lets appends of one store in."""

    def __init__(self, catalog: Catalog, limit: BackPressure) -> None:
        """Make the index that counting needs, where it is missing: a look at every row, once in a store's life."""
        self._catalog = catalog
        self._limit = limit
        with catalog.transaction("prepare back-pressure") as connection:
            connection.execute(_INDEX)

    def wait(self, tables: Mapping[str, pa.Table]) -> None:
        """Return when the append may begin.

        Raises:
            StoreFullError: there was no room in time; carries the counts.
        """
        begun = time.monotonic()
        for run_id in _runs(tables.get("rollouts")):
            while self._full(run_id):
                waited = time.monotonic() - begun
                if waited >= self._limit.seconds:
                    raise self._error(run_id)
                time.sleep(min(1 / _LOOKS_PER_SECOND, self._limit.seconds - waited))

    def _full(self, run_id: str) -> bool:
        # counts no further than the bound, whatever the size of the store
        (found,) = self._catalog.read().execute(
            f"SELECT count(*) FROM (SELECT 1 FROM index_rollouts WHERE run_id = ? AND partition = 'train' "
            f"AND {_WAITING} LIMIT ?) AS waiting",
            (run_id, self._limit.rows),
        ).fetchone()  # fmt: skip
        return found >= self._limit.rows

    def _error(self, run_id: str) -> StoreFullError:
        counts = waiting(self._catalog.read(), run_id)
        shown = ", ".join(f"{count} {name}" for name, count in counts.items())
        return StoreFullError(
            f"{self._catalog.layout.root}: {sum(counts.values())} rollouts of run {run_id!r} wait to be trained "
            f"({shown}), the bound is {self._limit.rows}, and none left within {self._limit.seconds:g} seconds; "
            "nothing was stored and nothing dropped: see that operators and trainer go on, or raise the bound"
        )


def waiting(connection: Connection, run_id: str) -> dict[str, int]:
    """Waiting rollouts of a run, by what they wait for: `new`, `held`, `kept`, `reserved`."""
    found = connection.execute(
        "SELECT CASE WHEN reserved_by IS NULL THEN status ELSE 'reserved' END, count(*) FROM index_rollouts "
        f"WHERE run_id = ? AND partition = 'train' AND {_WAITING} GROUP BY 1",
        (run_id,),
    )
    counts = dict(found.fetchall())
    return {name: int(counts.get(name, 0)) for name in ("new", "held", "kept", "reserved")}


def _runs(rollouts: pa.Table | None) -> list[str]:
    """Runs of the training rows; rows that say neither are refused later, by name."""
    if rollouts is None or not {"run_id", "partition"} <= set(rollouts.column_names):
        return []
    training = pc.equal(rollouts.column("partition"), "train")
    found = pc.unique(rollouts.column("run_id").filter(training)).to_pylist()
    return sorted(run for run in found if isinstance(run, str))
