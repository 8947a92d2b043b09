"""The store's accounts: every verdict, use and reference added up again from the rows and compared with the catalog."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from buffer_engine.schema import TableSpec
from buffer_engine.store.base import Finding
from buffer_engine.store.connection import Connection
from buffer_engine.store.index import STATUS_OF_VERDICT, unknown_rollouts


@dataclass(slots=True)
class Ledger:
    """What the stored rows say, collected while `verify` reads them.

    Attributes:
        damaged: tables with an unreadable frame; accounts that need them are not drawn up.
        verdicts: newest final verdict of each rollout.
        trained: rollouts of each batch, with how often they occur.
        manifests: batches with a `batches` row.
        about: rollouts that scores and decisions are about.
    """

    damaged: set[str] = field(default_factory=set[str])
    verdicts: dict[str, str] = field(default_factory=dict[str, str])
    trained: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    manifests: set[str] = field(default_factory=set[str])
    about: dict[str, set[str]] = field(default_factory=dict[str, set[str]])

    def read(self, spec: TableSpec, batch: pa.RecordBatch) -> None:
        """Take in the rows of one frame; frames come in commit order."""
        if spec.name in ("scores", "decisions"):
            self.about.setdefault(spec.name, set()).update(batch.column("experience_id").to_pylist())
        if spec.name == "decisions":
            for one, verdict in _pairs(batch, "experience_id", "verdict"):
                if verdict in STATUS_OF_VERDICT:
                    self.verdicts[one] = STATUS_OF_VERDICT[verdict]
        elif spec.name == "batch_rows":
            for batch_id, one in _pairs(batch, "batch_id", "experience_id"):
                self.trained.setdefault(batch_id, Counter())[one] += 1
        elif spec.name == "batches":
            self.manifests.update(batch.column("batch_id").to_pylist())

    def findings(self, connection: Connection) -> Iterator[Finding]:
        """Where the catalog and the rows disagree."""
        yield from self._dangling(connection)
        yield from _stray(connection)
        yield from _groups(connection)
        if "decisions" not in self.damaged:
            yield from self._verdict_findings(connection)
        if not self.damaged & {"batches", "batch_rows"}:
            yield from self._batch_findings(connection)

    def _dangling(self, connection: Connection) -> Iterator[Finding]:
        for table, ids in self.about.items():
            for one in sorted(unknown_rollouts(connection, ids)):
                yield Finding("missing_row", table, f"a row is about rollout {one}, which is not stored")

    def _verdict_findings(self, connection: Connection) -> Iterator[Finding]:
        for one, status in connection.execute("SELECT experience_id, status FROM index_rollouts ORDER BY sequence"):
            decided = self.verdicts.get(one, "new")
            if decided != status:
                yield Finding("conservation", one, f"its decisions say {decided}, the catalog says {status}")

    def _batch_findings(self, connection: Connection) -> Iterator[Finding]:
        uses: Counter[str] = Counter()
        known: set[str] = set()
        steps: dict[str, set[int | None]] = {}
        held: dict[str, set[str]] = {}
        for batch_id, one in connection.execute(
            "SELECT reserved_by, experience_id FROM index_rollouts WHERE reserved_by IS NOT NULL"
        ):
            held.setdefault(batch_id, set()).add(one)
        for batch_id, status, rows, step in connection.execute("SELECT batch_id, status, rows, step FROM batches"):
            known.add(batch_id)
            members = self.trained.get(batch_id, Counter())
            if status == "committed":
                uses.update(members.keys())
                for one in members:
                    steps.setdefault(one, set()).add(step)
            if status == "prepared" and held.get(batch_id, set()) != members.keys():
                yield Finding("conservation", batch_id, "the rows that it holds are not those of its manifest")
            if status in ("prepared", "committed"):
                if batch_id not in self.manifests:
                    yield Finding("missing_row", batch_id, f"the batch is {status} and has no row in batches")
                if members.total() != rows:
                    yield Finding("conservation", batch_id, f"{rows} rows recorded, {members.total()} in batch_rows")
            for one, times in members.items():
                if times > 1:
                    yield Finding("double_use", batch_id, f"rollout {one} occurs {times} times in the batch")
        for batch_id in sorted((self.manifests | set(self.trained)) - known):
            yield Finding("missing_row", batch_id, "a manifest is stored for a batch that the catalog does not know")
        counted: set[str] = set()
        for one, recorded, trained_step in connection.execute(
            "SELECT experience_id, uses, trained_step FROM index_rollouts ORDER BY sequence"
        ):
            counted.add(one)
            if trained_step not in steps.get(one, {None}):
                yield Finding("conservation", one, f"it was last trained at step {trained_step}, and in no such batch")
            if uses[one] != recorded:
                message = f"{uses[one]} committed batches hold it, the catalog counts {recorded}"
                yield Finding("double_use" if uses[one] > recorded else "conservation", one, message)
        members = {one for rows in self.trained.values() for one in rows}
        for one in sorted(members - counted):
            yield Finding("missing_row", "batch_rows", f"a row is about rollout {one}, which is not stored")


def _stray(connection: Connection) -> Iterator[Finding]:
    stray = connection.execute(
        "SELECT r.experience_id, r.reserved_by FROM index_rollouts r LEFT JOIN batches b ON b.batch_id = r.reserved_by "
        "WHERE r.reserved_by IS NOT NULL AND (b.status IS NULL OR b.status NOT IN ('reserved', 'prepared'))"
    )
    for one, batch_id in stray.fetchall():
        yield Finding("conservation", one, f"it is reserved by {batch_id}, which holds nothing any more")


def _groups(connection: Connection) -> Iterator[Finding]:
    found = connection.execute(
        "SELECT run_id, group_id, count(DISTINCT task_id), count(DISTINCT partition), count(DISTINCT sample_index), "
        "max(group_size), count(DISTINCT group_first) FROM index_rollouts GROUP BY run_id, group_id"
    )
    for run_id, group_id, tasks, partitions, samples, size, firsts in found.fetchall():
        where = f"{run_id}/{group_id}"
        if tasks > 1 or partitions > 1:
            yield Finding(
                "conservation", where, f"one group has {tasks} tasks and {partitions} partitions, not 1 and 1"
            )
        if samples > size:
            yield Finding("conservation", where, f"the group has {samples} samples and a size of {size}")
        if firsts > 1:
            yield Finding("catalog", where, "rows of one group disagree about its first row")
    wrong = connection.execute(
        "SELECT r.experience_id, r.partition, t.partition FROM index_rollouts r JOIN index_tasks t USING (task_id) "
        "WHERE r.partition <> t.partition"
    )
    for one, partition, other in wrong.fetchall():
        yield Finding("conservation", one, f"it is in partition {partition}, its task in {other}")


def _pairs(batch: pa.RecordBatch, one: str, other: str) -> Iterator[tuple[str, str]]:
    yield from zip(batch.column(one).to_pylist(), batch.column(other).to_pylist(), strict=True)
