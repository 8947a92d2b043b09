"""What became of batches, put into a recovered store: from the old catalog where it says so, else from the rows.

A commit appends the new `models` row and counts the batch in one transaction. So a manifest whose step made weights was
committed, and so was every manifest that a later one of the same run builds upon. A manifest without either was not:
its run replays or releases it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from buffer_engine.store.base import Durability
from buffer_engine.store.catalog import Catalog, next_version
from buffer_engine.store.connection import Connection
from buffer_engine.store.history import note_batch
from buffer_engine.store.layout import StoreLayout
from buffer_engine.store.local import LocalStore
from buffer_engine.store.salvage import Salvaged
from buffer_engine.store.segment_scan import FoundFrame

_MANIFEST = ("batch_id", "created_at")
_STATUSES = ("reserved", "prepared", "committed", "released")


@dataclass(slots=True)
class BatchReport:
    """What became of batches.

    Attributes:
        batches: batches by status.
        inferred: batches whose status was worked out from rows.
        left_out: what could not be taken over, in words.
    """

    batches: Counter[str] = field(default_factory=Counter[str])
    inferred: list[str] = field(default_factory=list[str])
    left_out: list[str] = field(default_factory=list[str])


def last_manifests(frames: Sequence[FoundFrame]) -> list[FoundFrame]:
    """The frames without manifests that nobody vouches for and that were written once more later.

    A trainer that dies before its manifest is acknowledged reserves and writes it again, perhaps with other rows. Had
    the first one been acknowledged, the second would have been refused.
    """
    written: dict[tuple[str, str], list[datetime]] = {}
    newest: dict[str, datetime] = {}
    vouched: set[str] = set()
    for one in frames:
        if one.table == "batches":
            for batch_id, at in zip(*(one.batch.column(name).to_pylist() for name in _MANIFEST), strict=True):
                written.setdefault((batch_id, _writer(one)), []).append(at)
                newest[batch_id] = max(newest.get(batch_id, at), at)
                if one.listing is not None:
                    vouched.add(batch_id)
    met: Counter[tuple[str, str, str]] = Counter()

    def counts(one: FoundFrame) -> bool:
        if one.table not in ("batches", "batch_rows") or one.listing is not None:
            return True
        batch_id = one.batch.column("batch_id")[0].as_py()  # one manifest is one frame in each of the two tables
        times = written.get((batch_id, _writer(one)), [])
        at = met[one.table, batch_id, _writer(one)]
        met[one.table, batch_id, _writer(one)] += 1
        return batch_id not in vouched and (at >= len(times) or times[at] == newest[batch_id])

    return [one for one in frames if counts(one)]


def _writer(frame: FoundFrame) -> str:
    """Who wrote a segment: `<table>/<writer>-<n>.arrows`."""
    return frame.segment.split("/")[-1].rpartition("-")[0]


def restore_batches(store: LocalStore, old: Salvaged, durability: Durability, report: BatchReport) -> None:
    """Enter the batches of all stored manifests into the catalog and count the uses of their rows.

    Raises:
        StoreError: the disk is full.
    """
    manifests: list[dict[str, Any]] = store.table("batches").to_pylist()
    members: dict[str, list[str]] = {}
    rows = store.table("batch_rows", columns=["batch_id", "experience_id"])
    for batch_id, one in zip(*(column.to_pylist() for column in rows.columns), strict=True):
        members.setdefault(batch_id, []).append(one)
    status_of = _statuses(store, manifests, old, report)
    held: set[str] = set()
    with closing(Catalog(StoreLayout(store.path), durability=durability, read_only=False)) as catalog:
        with catalog.transaction("enter batches") as connection:
            version = next_version(connection)
            for row in manifests:
                batch_id, mine = row["batch_id"], members.get(row["batch_id"], [])
                status = status_of[batch_id]
                if status == "prepared" and (len(mine) < row["rows"] or not held.isdisjoint(mine)):
                    report.left_out.append(
                        f"batch {batch_id} waited for its commit and only {len(mine)} of its {row['rows']} rows are "
                        "there, or another open batch holds them: it is released"
                    )
                    status = "released"
                if status == "prepared":
                    held.update(mine)
                report.batches[status] += 1
                _enter(connection, row, status, mine)
                note_batch(connection, version, batch_id)


def _statuses(store: LocalStore, manifests: list[dict[str, Any]], old: Salvaged, report: BatchReport) -> dict[str, str]:
    known = _known(old)
    models = store.table("models", columns=["run_id", "step"])
    made = set(zip(*(column.to_pylist() for column in models.columns), strict=True))
    newest: dict[str, int] = {}
    last: dict[tuple[str, int], str] = {}
    for row in manifests:
        newest[row["run_id"]] = max(newest.get(row["run_id"], 0), row["model_version"])
        last[row["run_id"], row["step"]] = row["batch_id"]  # in order of commit: a later manifest replaced this one
    found: dict[str, str] = {}
    for row in manifests:
        batch_id, run_id, step = row["batch_id"], row["run_id"], row["step"]
        status = known.get(batch_id, "reserved")
        if status == "reserved":  # or not known: there is a manifest, so more has become of it
            report.inferred.append(batch_id)
            if last[run_id, step] != batch_id:
                status = "released"
            elif (run_id, step) in made or newest[run_id] > row["model_version"]:
                status = "committed"
            else:
                status = "prepared"
        found[batch_id] = status
    return found


def _known(old: Salvaged) -> dict[str, str]:
    """Status of each batch as the old catalog has it; whatever part of it says committed is believed."""
    said: dict[str, str] = {}
    for _, batch_id, status, _ in old.rows["batch_history"]:
        if isinstance(batch_id, str) and status in _STATUSES:
            said[batch_id] = str(status)
    for batch_id, _, status, *_ in old.rows["batches"]:
        if isinstance(batch_id, str) and status in _STATUSES and said.get(batch_id) != "committed":
            said[batch_id] = str(status)
    return said


def _enter(connection: Connection, row: dict[str, Any], status: str, members: list[str]) -> None:
    written = row["created_at"].timestamp()
    connection.execute(
        "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            row["batch_id"], row["run_id"], status, row["step"], len(members), row["model_version"], written,
            time.time(), written if status == "committed" else None,
        ),
    )  # fmt: skip
    if status == "committed":
        connection.executemany(
            "UPDATE index_rollouts SET uses = uses + 1, trained_step = ? WHERE experience_id = ?",
            [(row["step"], one) for one in members],
        )
    elif status == "prepared":
        connection.executemany(
            "UPDATE index_rollouts SET reserved_by = ? WHERE experience_id = ?",
            [(row["batch_id"], one) for one in members],
        )
