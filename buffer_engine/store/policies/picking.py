"""Open reservations whose order or weights cannot be read off the row index."""

from __future__ import annotations

from collections.abc import Sequence

from buffer_engine.store.connection import Connection
from buffer_engine.store.policies.tables import has, need_picks


def remember(connection: Connection, batch_id: str, ids: Sequence[str], weights: Sequence[float]) -> None:
    """Keep order and weights of a reservation until it is prepared or over, and forget those that are."""
    need_picks(connection)
    connection.execute(
        "DELETE FROM reader_picks WHERE batch_id = ? "
        "OR batch_id NOT IN (SELECT batch_id FROM batches WHERE status = 'reserved')",
        (batch_id,),
    )
    given = weights or [1.0] * len(ids)
    connection.executemany(
        "INSERT INTO reader_picks VALUES (?, ?, ?, ?)",
        [(batch_id, position, *pick) for position, pick in enumerate(zip(ids, given, strict=True))],
    )


def recall(connection: Connection, batch_id: str) -> tuple[tuple[str, ...], tuple[float, ...]] | None:
    """Rows and weights of a reservation that was remembered."""
    if not has(connection, "reader_picks"):
        return None
    found = connection.execute(
        "SELECT experience_id, weight FROM reader_picks WHERE batch_id = ? ORDER BY position", (batch_id,)
    ).fetchall()
    if not found:
        return None
    weights = tuple(weight for _, weight in found)
    return tuple(one for one, _ in found), weights if set(weights) != {1.0} else ()
