"""Numbers and names of rows that a policy orders by and the row index does not have.

Scores, advantages and task sets lie in narrow tables of the log. Each is read once, frame by frame, as it grows; what a
batch costs depends on what was stored since the last one. Of the rollouts' payload only `made_by` of new groups and
`token_versions` of over-age rows are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

import pyarrow as pa

from buffer_engine.store.base import ReadPolicy
from buffer_engine.store.catalog import current_version
from buffer_engine.store.connection import Connection
from buffer_engine.store.policies.judging import GroupRow
from buffer_engine.store.reading import Frame, SegmentReader, frames_by_id, frames_of

EXPERT, ROLLOUT = "expert", "rollout"


class Facts:
    """What is known about rows of one store, inside one transaction."""

    def __init__(self, connection: Connection, reader: SegmentReader) -> None:
        self._connection = connection
        self._reader = reader
        self._frames: dict[int, Frame] = {}

    def catch_up(self, policies: Sequence[ReadPolicy]) -> None:
        """Read what was stored since the last time of the tables that `policies` need; late scores mark their groups.

        Raises:
            CorruptSegmentError: a frame is damaged.
        """
        wanted = {name for policy in policies for name in _sources(policy)}
        if "scores" in wanted:
            self._read("scores", self._take_scores)
        if "batch_rows" in wanted:
            self._read("batch_rows", self._take_advantages)
        if "tasks" in wanted:
            self._read("tasks", self._take_tasks)

    def stratum(self, policy: ReadPolicy, rows: Sequence[GroupRow], ready: Sequence[GroupRow]) -> str:
        """The part of the policy's tree that a group belongs to."""
        if policy.type == "mixture":
            return EXPERT if self._cell(rows[0], "made_by").as_py() == "import" else ROLLOUT
        if policy.type == "stratified" and policy.by == "task":
            return rows[0].task_id
        if policy.type == "stratified":
            found = self._one("SELECT taskset FROM reader_tasks WHERE task_id = ?", rows[0].task_id)
            return "" if found is None else str(found)
        if policy.type == "prioritized" and policy.by == "staleness":
            versions = [row.model_version for row in ready if row.model_version is not None]
            return str(min(versions)) if versions else ""
        return ""

    def priority(self, policy: ReadPolicy, rows: Sequence[GroupRow]) -> float:
        """The number that a group is prioritized by: the mean over its ready rows; rows without one count `unseen`."""
        look_up = self._number(policy.by or "")
        return fmean(policy.unseen if value is None else value for value in map(look_up, rows))

    def newest_version(self, row: GroupRow) -> int | None:
        """Newest weight version that sampled a token of the row; None when none is recorded."""
        versions = self._cell(row, "token_versions").as_py()
        return max((one["version"] for one in versions), default=None)

    def tokens(self, rows: Sequence[GroupRow]) -> list[int]:
        """Length of each row in tokens, prompt included."""
        return [len(self._cell(row, "token_ids")) for row in rows]

    def _number(self, by: str) -> Callable[[GroupRow], float | None]:
        if by == "reward":
            return self._reward
        if by == "advantage":
            return self._advantage
        name = by.removeprefix("score:")
        query = "SELECT value FROM reader_scores WHERE experience_id = ? AND name = ?"
        return lambda row: self._one(query, row.experience_id, name)

    def _reward(self, row: GroupRow) -> float | None:
        found = self._connection.execute(
            "SELECT value, weight FROM reader_scores WHERE experience_id = ? AND weight IS NOT NULL AND weight <> 0 "
            "ORDER BY name",
            (row.experience_id,),
        ).fetchall()
        if not found or any(value is None for value, _ in found):
            return None
        return sum(value * weight for value, weight in found)

    def _advantage(self, row: GroupRow) -> float | None:
        return self._one(
            "SELECT abs(a.advantage) FROM reader_advantages a JOIN batches b USING (batch_id) "
            "WHERE a.experience_id = ? AND b.status = 'committed' ORDER BY b.step DESC LIMIT 1",
            row.experience_id,
        )

    def _cell(self, row: GroupRow, column: str) -> Any:
        """One value of the payload as an Arrow scalar; nothing else of the row is decoded."""
        frame = self._frames.get(row.frame_id)
        if frame is None:
            frame = self._frames[row.frame_id] = frames_by_id(self._connection, [row.frame_id])[row.frame_id]
        return self._reader.arrays(frame, [column])[0][row.row]

    def _one(self, query: str, *arguments: str) -> Any:
        found = self._connection.execute(query, arguments).fetchone()
        return None if found is None else found[0]

    def _read(self, table: str, take: Callable[[pa.RecordBatch, bool], None]) -> None:
        seen = self._one("SELECT version FROM reader_sources WHERE name = ?", table) or 0
        now = current_version(self._connection)
        if now == seen:
            return
        damaged = {row[0] for row in self._connection.execute("SELECT frame_id FROM quarantine")}
        for frame in frames_of(self._connection, table, after=seen):
            if frame.frame_id in damaged:
                continue
            # at the first reading the tree that asks was just made, and finds every group changed anyway
            take(self._reader.batch(frame), seen > 0)
        self._connection.execute("INSERT OR REPLACE INTO reader_sources VALUES (?, ?)", (table, now))

    def _take_scores(self, batch: pa.RecordBatch, late: bool) -> None:
        rows = list(_columns(batch, "experience_id", "name", "version", "value", "weight"))
        self._connection.executemany(
            "INSERT INTO reader_scores VALUES (?, ?, ?, ?, ?) ON CONFLICT (experience_id, name) DO UPDATE SET "
            "version = excluded.version, value = excluded.value, weight = excluded.weight "
            "WHERE excluded.version > reader_scores.version",
            rows,
        )
        if not late:
            return
        self._connection.executemany(
            "INSERT OR IGNORE INTO reader_dirty SELECT run_id, group_id FROM index_rollouts "
            "WHERE experience_id = ? AND partition = 'train'",
            [(row[0],) for row in rows],
        )

    def _take_advantages(self, batch: pa.RecordBatch, _: bool) -> None:
        rows = _columns(batch, "experience_id", "batch_id", "advantage")
        self._connection.executemany(
            "INSERT OR REPLACE INTO reader_advantages VALUES (?, ?, ?)", [row for row in rows if row[2] is not None]
        )

    def _take_tasks(self, batch: pa.RecordBatch, _: bool) -> None:
        self._connection.executemany(
            "INSERT OR REPLACE INTO reader_tasks VALUES (?, ?)", list(_columns(batch, "task_id", "taskset"))
        )


def _sources(policy: ReadPolicy) -> tuple[str, ...]:
    by = policy.by or ""
    if policy.type == "prioritized" and (by == "reward" or by.startswith("score:")):
        return ("scores",)
    if policy.type == "prioritized" and by == "advantage":
        return ("batch_rows",)
    return ("tasks",) if policy.type == "stratified" and by == "taskset" else ()


def _columns(batch: pa.RecordBatch, *names: str) -> Iterator[tuple[object, ...]]:
    return zip(*(batch.column(name).to_pylist() for name in names), strict=True)
