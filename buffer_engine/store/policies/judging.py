"""One group against a policy: which of its rows train now, which are rejected, and when to look again.

Everything that decides about a group is here and looks at nothing but the group, so the walk over arrivals, the index
of ready groups and the tests all mean the same by "ready".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from buffer_engine.store.base import ReadPolicy
from buffer_engine.store.connection import Connection

Refusal = tuple[str, str, str]
"""(experience id, reason, detail)."""

_READABLE = "i.sequence NOT IN (SELECT sequence FROM quarantined_rollouts)"
"""A row that the store rejected because it is damaged is a missing sibling; one rejected before is what it was."""


class GroupRow(NamedTuple):
    """Bookkeeping of one rollout of a group; `frame_id` and `row` say where its payload lies.

    A tuple because the first reservation may make one for every row of a store.
    """

    experience_id: str
    sequence: int
    task_id: str
    status: str
    uses: int
    reserved_by: str | None
    failed: bool
    group_size: int
    sample_index: int
    attempt: int
    turn_index: int
    model_version: int | None
    trained_step: int | None
    frame_id: int
    row: int


@dataclass(frozen=True, slots=True)
class Judgement:
    """What becomes of a group at one weight version.

    Attributes:
        ready: rows to train, in the order of samples; empty when the group waits or is over.
        refused: rows to reject, each with reason and detail.
        masked: those of `ready` whose over-age tokens may not train, with the oldest version of each.
        recheck: first weight version at which the answer changes although the group does not; None: never.
    """

    ready: tuple[GroupRow, ...] = ()
    refused: tuple[Refusal, ...] = ()
    masked: tuple[tuple[str, int], ...] = ()
    recheck: int | None = None


def rows_of_group(connection: Connection, run_id: str, group_id: str) -> list[GroupRow]:
    """Training rows of a group, by sample, attempt and turn."""
    found = connection.execute(
        f"SELECT {', '.join(GroupRow._fields)} FROM index_rollouts i "
        f"WHERE run_id = ? AND group_id = ? AND partition = 'train' AND {_READABLE}",
        (run_id, group_id),
    )
    return sorted(map(GroupRow._make, found), key=_place)


def rows_of_changed(connection: Connection, run_id: str) -> Iterator[tuple[str, list[GroupRow]]]:
    """Groups of a run in `reader_dirty` with their rows, as `rows_of_group` gives them; none when all were deleted."""
    found = connection.execute(
        f"SELECT d.group_id, {', '.join(f'i.{name}' for name in GroupRow._fields)} FROM reader_dirty d "
        f"LEFT JOIN index_rollouts i ON i.run_id = d.run_id AND i.group_id = d.group_id AND {_READABLE} "
        "WHERE d.run_id = ? ORDER BY d.group_id",
        (run_id,),
    )
    for group_id, rows in groupby(found, key=itemgetter(0)):
        # the partition is that of the whole group, so only training groups are ever noted
        yield group_id, sorted((GroupRow._make(row[1:]) for row in rows if row[1] is not None), key=_place)


def _place(row: GroupRow) -> tuple[int, int, int, int]:
    return row.sample_index, row.attempt, row.turn_index, row.sequence


def judge(
    rows: Sequence[GroupRow],
    policy: ReadPolicy,
    model_version: int,
    newest_version: Callable[[GroupRow], int | None],
) -> Judgement:
    """What `policy` makes of a group when weights `model_version` train next.

    Args:
        rows: all training rows of the group; none when all are damaged.
        newest_version: newest token version of a row (None: it has none); asked only about rows that are over-age.
    """
    kept = [row for row in rows if row.status == "kept"]
    if (
        not kept
        or any(row.status in ("new", "held") for row in rows)
        or any(row.reserved_by is not None for row in kept)
    ):
        return Judgement()
    able = [row for row in kept if not row.failed and row.uses < policy.max_uses]
    present, size = len({row.sample_index for row in rows}), max(row.group_size for row in rows)
    if present < size and policy.incomplete == "wait":
        return Judgement()
    if present < size and policy.incomplete == "drop":
        detail = f"{present} of {size} siblings"
        return Judgement(refused=tuple((row.experience_id, "incomplete", detail) for row in able))
    # weights v train at step v + 1, so a row trained at step s has rested for v - s steps
    rested = max((row.trained_step + policy.cooldown_steps for row in able if row.trained_step is not None), default=0)
    if policy.cooldown_steps and model_version < rested:
        return Judgement(recheck=rested)
    if policy.max_staleness is None:
        return Judgement(ready=tuple(able))
    return _by_age(able, policy, model_version, policy.max_staleness, newest_version)


def _by_age(
    able: Sequence[GroupRow],
    policy: ReadPolicy,
    model_version: int,
    limit: int,
    newest_version: Callable[[GroupRow], int | None],
) -> Judgement:
    versions = [row.model_version for row in able if row.model_version is not None]
    if not versions:
        return Judgement(ready=tuple(able))
    oldest = min(versions)
    if model_version - oldest <= limit:
        return Judgement(ready=tuple(able), recheck=oldest + limit + 1)
    if policy.over_age == "reject":
        # a row that has trained already was used, not discarded: it is only not taken again
        return Judgement(refused=_stale((row for row in able if row.uses == 0), oldest, model_version, limit))
    ready: list[GroupRow] = []
    over: list[GroupRow] = []
    masked: list[tuple[str, int]] = []
    changes: list[int] = []
    for row in able:
        if row.model_version is None:
            ready.append(row)
        elif model_version - row.model_version <= limit:
            ready.append(row)
            changes.append(row.model_version + limit + 1)
        else:
            newest = newest_version(row)
            if newest is None or model_version - newest > limit:
                over.append(row)
            else:
                ready.append(row)
                masked.append((row.experience_id, row.model_version))
                changes.append(newest + limit + 1)
    refused = _stale((row for row in over if row.uses == 0), oldest, model_version, limit)
    return Judgement(tuple(ready), refused, tuple(masked), min(changes, default=None))


def _stale(rows: Iterable[GroupRow], oldest: int, model_version: int, limit: int) -> tuple[Refusal, ...]:
    detail = f"token version {oldest}, weights {model_version}, limit {limit}"
    return tuple((row.experience_id, "stale", detail) for row in rows)
