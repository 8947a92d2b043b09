"""The sample-to-insert limiter: training waits while it is too far ahead of what was stored."""

from __future__ import annotations

from buffer_engine.store.base import ReadPolicy
from buffer_engine.store.connection import Connection
from buffer_engine.store.policies.tables import need_counts


def too_far_ahead(connection: Connection, policy: ReadPolicy, run_id: str, rows: int) -> str | None:
    """Why a batch of `rows` rows has to wait, with the numbers; None when it need not.

    Counted are kept rows of the run, committed uses of rows, and the rows of batches that are open.
    """
    if policy.samples_per_insert is None:
        return None
    need_counts(connection)
    counted = connection.execute("SELECT kept, uses FROM reader_counts WHERE run_id = ?", (run_id,)).fetchone()
    kept, uses = counted if counted is not None else (0, 0)
    (opened,) = connection.execute(
        "SELECT coalesce(sum(rows), 0) FROM batches WHERE run_id = ? AND status IN ('reserved', 'prepared')", (run_id,)
    ).fetchone()
    if kept < policy.min_size:
        return f"{kept} rows are kept, min_size is {policy.min_size}"
    allowed = policy.samples_per_insert * kept
    if uses + opened + rows > allowed:
        return (
            f"{uses} uses, {opened} rows in open batches and {rows} more exceed {policy.samples_per_insert:g} per row "
            f"of {kept} kept"
        )
    return None


def first_time(connection: Connection, run_id: str, batch_id: str) -> bool:
    """Whether this batch was not held back before; remembers it."""
    found = connection.execute("SELECT limited FROM reader_counts WHERE run_id = ?", (run_id,)).fetchone()
    if found is not None and found[0] == batch_id:
        return False
    connection.execute(
        "INSERT INTO reader_counts VALUES (?, 0, 0, ?) ON CONFLICT (run_id) DO UPDATE SET limited = excluded.limited",
        (run_id, batch_id),
    )
    return True
