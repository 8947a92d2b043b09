"""The row index in the catalog: where each key lies, what its content hashes to, and a rollout's bookkeeping."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import pyarrow as pa

from buffer_engine.schema import TableSpec
from buffer_engine.store.connection import Connection, is_unique_violation
from buffer_engine.store.keyblocks import BLOCKED, KeyBlocks, KeyTakenError, fingerprints, key_columns

Key = tuple[str | int, ...]
Place = tuple[int, int]
"""(frame id, row within the frame)."""

ROLLOUT_COLUMNS = (
    "experience_id", "run_id", "task_id", "group_id", "group_size", "attempt", "sample_index", "turn_index",
    "partition", "model_version",
)  # fmt: skip
"""Columns of a rollout that its index row repeats."""


STATUS_OF_VERDICT = {"keep": "kept", "reject": "rejected", "hold": "held", "release": "new"}


def keys_of(spec: TableSpec, batch: pa.RecordBatch) -> list[Key]:
    """Key tuples of the rows, in order; empty tuples for a table without key."""
    if not spec.key:
        return [()] * batch.num_rows
    return list(zip(*(batch.column(name).to_pylist() for name in spec.key), strict=True))


def stored(connection: Connection, spec: TableSpec, keys: Sequence[Key]) -> dict[Key, tuple[Place, bytes]]:
    """Place and content hash of those `keys` that the table already has."""
    if not keys:
        return {}
    match = " AND ".join(f"i.{name} = json_extract(k.value, '$[{at}]')" for at, name in enumerate(spec.key))
    found = connection.execute(
        f"SELECT {', '.join(f'i.{name}' for name in spec.key)}, i.frame_id, i.row, i.content "
        f"FROM json_each(?) k CROSS JOIN index_{spec.name} i ON {match}",
        (json.dumps(keys),),
    )
    width = len(spec.key)
    return {row[:width]: ((row[width], row[width + 1]), row[width + 2]) for row in found}


def places_of(connection: Connection, experience_ids: Sequence[str]) -> list[tuple[str, int, int]]:
    """(experience id, frame, row) of those of the rollouts that are stored, in commit order."""
    return connection.execute(
        "SELECT experience_id, frame_id, row FROM index_rollouts "
        "WHERE experience_id IN (SELECT value FROM json_each(?)) ORDER BY frame_id, row",
        (json.dumps(list(experience_ids)),),
    ).fetchall()


def places_by_key(connection: Connection, spec: TableSpec, ids: Sequence[str]) -> list[Place]:
    """(frame, row) of a table's rows with one of `ids` in the first column of their key, in commit order."""
    return connection.execute(
        f"SELECT frame_id, row FROM index_{spec.name} "
        f"WHERE {spec.key[0]} IN (SELECT value FROM json_each(?)) ORDER BY frame_id, row",
        (json.dumps(list(ids)),),
    ).fetchall()


def unknown_rollouts(connection: Connection, experience_ids: Iterable[str]) -> set[str]:
    """Those of the ids that no stored rollout has."""
    wanted = list(experience_ids)
    if not wanted:
        return set()
    listed = json.dumps(wanted)
    (found,) = connection.execute(
        "SELECT count(*) FROM json_each(?) k CROSS JOIN index_rollouts i ON i.experience_id = k.value", (listed,)
    ).fetchone()
    if found == len(wanted):  # the usual case, and counting is the quicker half
        return set()
    unknown = connection.execute(
        "SELECT value FROM json_each(?) "
        "WHERE NOT EXISTS (SELECT 1 FROM index_rollouts i WHERE i.experience_id = json_each.value)",
        (listed,),
    )
    return {row[0] for row in unknown}


def runs_of(connection: Connection, experience_ids: Iterable[str]) -> dict[str, str]:
    """Run of those of the rollouts that are stored."""
    found = connection.execute(
        "SELECT experience_id, run_id FROM json_each(?) k CROSS JOIN index_rollouts i ON i.experience_id = k.value",
        (json.dumps(sorted(set(experience_ids))),),
    )
    return dict(found.fetchall())


def tasks_with_prompts(connection: Connection, prompt_hashes: Sequence[str]) -> list[tuple[str, str, str]]:
    """(task id, partition, prompt hash) of the stored tasks with one of these prompts."""
    return connection.execute(
        "SELECT i.task_id, i.partition, i.prompt_hash FROM json_each(?) k "
        "CROSS JOIN index_tasks i ON i.prompt_hash = k.value",
        (json.dumps(list(prompt_hashes)),),
    ).fetchall()


def partitions_of_tasks(connection: Connection, task_ids: Iterable[str]) -> dict[str, str]:
    """Partition of those of the tasks that are stored."""
    found = connection.execute(
        "SELECT i.task_id, i.partition FROM json_each(?) k CROSS JOIN index_tasks i ON i.task_id = k.value",
        (json.dumps(sorted(set(task_ids))),),
    )
    return dict(found.fetchall())


def insert(
    connection: Connection,
    spec: TableSpec,
    batch: pa.RecordBatch,
    keys: Sequence[Key],
    contents: Sequence[bytes],
    frame_id: int,
) -> None:
    """Index the rows of a frame, of any table.

    Raises:
        KeyTakenError: a key is indexed already; the transaction has to be rolled back.
    """
    if not spec.key:
        return
    if spec.name in BLOCKED:
        KeyBlocks().insert(connection, spec, fingerprints(key_columns(spec, batch)), frame_id)
        return
    try:
        _insert(connection, spec, batch, keys, contents, frame_id)
    except Exception as error:
        if not is_unique_violation(error):
            raise
        raise KeyTakenError(spec.name) from error


def _insert(
    connection: Connection,
    spec: TableSpec,
    batch: pa.RecordBatch,
    keys: Sequence[Key],
    contents: Sequence[bytes],
    frame_id: int,
) -> None:
    if spec.name == "rollouts":
        _insert_rollouts(connection, batch, contents, frame_id)
        return
    columns = [*spec.key, "frame_id", "row", "content"]
    rows = [(*key, frame_id, row, content) for row, (key, content) in enumerate(zip(keys, contents, strict=True))]
    if spec.name == "tasks":
        columns += ["partition", "prompt_hash"]
        extra = zip(batch.column("partition").to_pylist(), batch.column("prompt_hash").to_pylist(), strict=True)
        rows = [(*row, *more) for row, more in zip(rows, extra, strict=True)]
    connection.executemany(
        f"INSERT INTO index_{spec.name} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})", rows
    )


def _insert_rollouts(connection: Connection, batch: pa.RecordBatch, contents: Sequence[bytes], frame_id: int) -> None:
    values = [batch.column(name).to_pylist() for name in ROLLOUT_COLUMNS]
    failed = batch.column("error").is_valid().cast(pa.int8()).to_pylist()
    groups: list[tuple[str, str]] = list(zip(values[1], values[3], strict=True))
    (last,) = connection.execute("SELECT coalesce(max(sequence), 0) FROM index_rollouts").fetchone()
    first = _first_sequences(connection, groups)
    rows: list[tuple[object, ...]] = []
    for row, (group, bad, content, *rest) in enumerate(zip(groups, failed, contents, *values, strict=True)):
        sequence = last + 1 + row
        rows.append((sequence, frame_id, row, content, bad, first.setdefault(group, sequence), *rest))
    columns = ("sequence", "frame_id", "row", "content", "failed", "group_first", *ROLLOUT_COLUMNS)
    connection.executemany(
        f"INSERT INTO index_rollouts ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})", rows
    )
    connection.executemany("INSERT OR IGNORE INTO runs VALUES (?)", [(run_id,) for run_id in sorted(set(values[1]))])


def _first_sequences(connection: Connection, groups: Sequence[tuple[str, str]]) -> dict[tuple[str, str], int]:
    found = connection.execute(
        "SELECT i.run_id, i.group_id, min(i.group_first) FROM json_each(?) k CROSS JOIN index_rollouts i "
        "ON i.run_id = json_extract(k.value, '$[0]') AND i.group_id = json_extract(k.value, '$[1]') GROUP BY 1, 2",
        (json.dumps(sorted(set(groups))),),
    )
    return {(run_id, group_id): first for run_id, group_id, first in found}


def apply_verdicts(connection: Connection, decisions: pa.RecordBatch) -> None:
    """Move the status of the rollouts that new decision rows are about; of several the last counts."""
    latest: dict[str, str] = {}
    pairs = zip(decisions.column("experience_id").to_pylist(), decisions.column("verdict").to_pylist(), strict=True)
    for experience_id, verdict in pairs:
        if verdict in STATUS_OF_VERDICT:  # a mask leaves the verdict as it is
            latest[experience_id] = STATUS_OF_VERDICT[verdict]
    connection.executemany(
        "UPDATE index_rollouts SET status = ? WHERE experience_id = ?",
        [(status, experience_id) for experience_id, status in latest.items()],
    )
