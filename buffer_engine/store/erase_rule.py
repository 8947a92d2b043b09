"""Which rollouts a retention rule names, and whether training still wants them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pyarrow.compute as pc

from buffer_engine.errors import StoreError
from buffer_engine.store.catalog import current_version
from buffer_engine.store.connection import Connection
from buffer_engine.store.frames import frames_of
from buffer_engine.store.reading import SegmentReader


@dataclass(frozen=True, slots=True)
class EraseRule:
    """Rows by what became of them; with `run_id` only those of that run, which may also stand alone.

    Attributes:
        rejected_seconds: rejected rows whose last verdict is older than this many seconds.
        rejected_versions: rejected rows whose last verdict is older than this many catalog versions.
        trained_before_step: rows that trained, and last did before this optimizer step.
        experience_ids: these rows.
        run_id: rows of this run.
    """

    rejected_seconds: float | None = None
    rejected_versions: int | None = None
    trained_before_step: int | None = None
    experience_ids: tuple[str, ...] | None = None
    run_id: str | None = None

    def __post_init__(self) -> None:
        """Exactly one way to choose rows.

        Raises:
            StoreError: there is none, or there are several.
        """
        given = [name for name in _CHOICES if getattr(self, name) is not None]
        if len(given) > 1:
            raise StoreError(f"a rule chooses rows in one way, and {' and '.join(given)} are given; erase twice")
        if not given and self.run_id is None:
            raise StoreError(f"the rule names no rows; give one of {', '.join(_CHOICES)}, or run_id")

    @property
    def text(self) -> str:
        """The rule in words, as the record keeps it."""
        said = {
            "rejected_seconds": f"rejected more than {_duration(self.rejected_seconds or 0)} ago",
            "rejected_versions": f"rejected more than {self.rejected_versions} versions ago",
            "trained_before_step": f"last trained before step {self.trained_before_step}",
            "experience_ids": f"{len(self.experience_ids or ())} by id",
        }
        chosen = [said[name] for name in _CHOICES if getattr(self, name) is not None]
        return ", ".join([*chosen, *([] if self.run_id is None else [f"run {self.run_id}"])])


_CHOICES = ("rejected_seconds", "rejected_versions", "trained_before_step", "experience_ids")


@dataclass(frozen=True, slots=True)
class Target:
    """A rollout that a rule names.

    Attributes:
        fate: rejected, trained, failed, kept, new or held.
        undecided: training waits for its first use of the row, so that a verdict has to take it out of the queue.
        wanted: a batch holds it, training waits for it, or a resumed run would train it again.
    """

    experience_id: str
    run_id: str
    frame_id: int
    row: int
    status: str
    fate: str
    undecided: bool
    wanted: bool


def targets(
    connection: Connection, reader: SegmentReader, rule: EraseRule, *, max_uses: int, replays: Mapping[str, int]
) -> list[Target]:
    """The rows of a rule that are not erased yet, in order of arrival.

    Args:
        max_uses: a kept row trained fewer times than this is waited for.
        replays: see `LocalStore.erase`.

    Raises:
        StoreError: a named row is not stored.
    """
    where = "1 = 1"
    arguments: list[str | int] = []
    if rule.run_id is not None:
        where = "run_id = ?"
        arguments.append(rule.run_id)
    if rule.rejected_seconds is not None or rule.rejected_versions is not None:
        where += " AND status = 'rejected'"
    elif rule.trained_before_step is not None:
        where += " AND trained_step < ?"
        arguments.append(rule.trained_before_step)
    elif rule.experience_ids is not None:
        _refuse_unknown(connection, rule.experience_ids)
        where += " AND experience_id IN (SELECT value FROM json_each(?))"
        arguments.append(json.dumps(list(rule.experience_ids)))
    found = connection.execute(
        "SELECT experience_id, run_id, frame_id, row, status, uses, reserved_by, partition, failed, trained_step "
        "FROM index_rollouts "
        f"WHERE {where} AND NOT EXISTS "
        "(SELECT 1 FROM index_erasures e WHERE e.experience_id = index_rollouts.experience_id) ORDER BY sequence",
        arguments,
    )
    rows = found.fetchall()
    if rule.rejected_seconds is not None or rule.rejected_versions is not None:
        late = _rejected_lately(connection, reader, rule)
        rows = [row for row in rows if row[0] not in late]
    return [_target(row, max_uses, replays) for row in rows]


def _target(row: Sequence[object], max_uses: int, replays: Mapping[str, int]) -> Target:
    experience_id, run_id, frame_id, at, status, uses, reserved_by, partition, failed, trained_step = row
    assert isinstance(uses, int)
    assert isinstance(frame_id, int)
    assert isinstance(at, int)
    waiting = (
        partition == "train" and not failed and (status in ("new", "held") or (status == "kept" and uses < max_uses))
    )
    fate = "failed" if failed else "trained" if uses else str(status)
    undecided = waiting and not uses
    again = isinstance(trained_step, int) and trained_step > replays.get(str(run_id), trained_step)
    wanted = waiting or again or reserved_by is not None
    return Target(str(experience_id), str(run_id), frame_id, at, str(status), fate, undecided, wanted)


def _refuse_unknown(connection: Connection, experience_ids: Sequence[str]) -> None:
    unknown = connection.execute(
        "SELECT value FROM json_each(?) WHERE value NOT IN (SELECT experience_id FROM index_rollouts)",
        (json.dumps(list(experience_ids)),),
    ).fetchall()
    if unknown:
        raise StoreError(
            f"{len(unknown)} of {len(experience_ids)} named rows are not stored, the first is {unknown[0][0]!r}; "
            "nothing was erased: check the ids"
        )


def _rejected_lately(connection: Connection, reader: SegmentReader, rule: EraseRule) -> set[str]:
    """Rows with a verdict that is too young for the rule."""
    after = 0
    columns = ["experience_id", "decided_at"]
    if rule.rejected_versions is not None:
        after = max(current_version(connection) - rule.rejected_versions, 0)
    batches = reader.batches(frames_of(connection, "decisions", after=after), columns)
    late: set[str] = set()
    for batch in batches:
        ids = batch.column("experience_id")
        if rule.rejected_seconds is not None:
            limit = datetime.fromtimestamp(time.time(), UTC) - timedelta(seconds=rule.rejected_seconds)
            ids = ids.filter(pc.greater(batch.column("decided_at"), limit))
        late.update(ids.to_pylist())
    return late


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"
