"""Tables and triggers of the reader's index, made in the catalog when a policy first needs them.

Everything here can be derived from rows and verdicts. It is therefore no part of the schema version: a store that is
only read in order of arrival never has these tables, and dropping them loses nothing but the time to fill them again.
Triggers note which groups changed, whoever changes them, in the same transaction; the next reservation catches up.

| table | one row per |
|---|---|
| `reader_dirty` | group that changed since the run's last reservation |
| `reader_trees` | run and policy; `version` is the weight version it was last brought up to |
| `reader_leaves` | group that is ready or has to be looked at again: its part (stratum), rows and integer weight |
| `reader_strata` | part of a tree: ready groups, their weight, how often groups of it were used |
| `reader_nodes` | inner node of the sum tree over the arrival numbers of a part's ready groups |
| `reader_scores`, `reader_advantages`, `reader_tasks` | number of a row that some policy orders by |
| `reader_sources` | narrow table: the catalog version up to which it was read into the three above |
| `reader_counts` | run: kept rows and uses |
| `reader_picks` | row of an open reservation: its place and weight |
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from buffer_engine.store.connection import Connection

LEVELS = (6, 10, 14, 18, 22)
"""A node of level k covers arrival numbers that agree above these many bits; the first is the lowest."""

_DIRTY = """
CREATE TABLE IF NOT EXISTS reader_dirty (
    run_id TEXT NOT NULL, group_id TEXT NOT NULL, PRIMARY KEY (run_id, group_id)
) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS reader_row_added AFTER INSERT ON index_rollouts
WHEN new.partition = 'train' BEGIN
    INSERT OR IGNORE INTO reader_dirty VALUES (new.run_id, new.group_id);
END;
CREATE TRIGGER IF NOT EXISTS reader_row_moved AFTER UPDATE OF status, uses, reserved_by ON index_rollouts
WHEN new.partition = 'train' AND (
    old.status <> new.status OR old.uses <> new.uses OR old.reserved_by IS NOT new.reserved_by
) BEGIN
    INSERT OR IGNORE INTO reader_dirty VALUES (new.run_id, new.group_id);
END;
CREATE TRIGGER IF NOT EXISTS reader_row_deleted AFTER DELETE ON index_rollouts
WHEN old.partition = 'train' BEGIN
    INSERT OR IGNORE INTO reader_dirty VALUES (old.run_id, old.group_id);
END;
CREATE TABLE IF NOT EXISTS reader_trees (
    tree INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, policy TEXT NOT NULL, version INTEGER NOT NULL,
    used INTEGER NOT NULL, UNIQUE (run_id, policy)
);
CREATE TABLE IF NOT EXISTS reader_leaves (
    tree INTEGER NOT NULL, group_id TEXT NOT NULL, first INTEGER NOT NULL, stratum TEXT NOT NULL,
    weight INTEGER NOT NULL, served INTEGER NOT NULL, recheck INTEGER, PRIMARY KEY (tree, group_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS reader_leaves_ready ON reader_leaves (tree, stratum, first) WHERE weight > 0;
CREATE INDEX IF NOT EXISTS reader_leaves_due ON reader_leaves (tree, recheck) WHERE recheck IS NOT NULL;
CREATE TABLE IF NOT EXISTS reader_strata (
    tree INTEGER NOT NULL, stratum TEXT NOT NULL, ready INTEGER NOT NULL, weight INTEGER NOT NULL,
    served INTEGER NOT NULL, PRIMARY KEY (tree, stratum)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS reader_strata_served ON reader_strata (tree, served, stratum) WHERE ready > 0;
CREATE TABLE IF NOT EXISTS reader_nodes (
    tree INTEGER NOT NULL, stratum TEXT NOT NULL, level INTEGER NOT NULL, node INTEGER NOT NULL,
    weight INTEGER NOT NULL, PRIMARY KEY (tree, stratum, level, node)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS reader_sources (name TEXT PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS reader_scores (
    experience_id TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, value REAL, weight REAL,
    PRIMARY KEY (experience_id, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS reader_advantages (
    experience_id TEXT NOT NULL, batch_id TEXT NOT NULL, advantage REAL NOT NULL, PRIMARY KEY (experience_id, batch_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS reader_tasks (task_id TEXT PRIMARY KEY, taskset TEXT NOT NULL) WITHOUT ROWID;
"""

_COUNTS = """
CREATE TABLE IF NOT EXISTS reader_counts (
    run_id TEXT PRIMARY KEY, kept INTEGER NOT NULL, uses INTEGER NOT NULL, limited TEXT
) WITHOUT ROWID;
INSERT OR IGNORE INTO reader_counts
    SELECT run_id, sum(CASE WHEN status = 'kept' THEN 1 ELSE 0 END), sum(uses), NULL FROM index_rollouts
    WHERE partition = 'train' GROUP BY run_id;
CREATE TRIGGER IF NOT EXISTS reader_kept_counted AFTER UPDATE OF status ON index_rollouts
WHEN new.partition = 'train' AND (old.status = 'kept') <> (new.status = 'kept') BEGIN
    INSERT INTO reader_counts VALUES (new.run_id, CASE WHEN new.status = 'kept' THEN 1 ELSE -1 END, 0, NULL)
    ON CONFLICT (run_id) DO UPDATE SET kept = reader_counts.kept + excluded.kept;
END;
CREATE TRIGGER IF NOT EXISTS reader_uses_counted AFTER UPDATE OF uses ON index_rollouts
WHEN new.partition = 'train' AND old.uses <> new.uses BEGIN
    INSERT INTO reader_counts VALUES (new.run_id, 0, new.uses - old.uses, NULL)
    ON CONFLICT (run_id) DO UPDATE SET uses = reader_counts.uses + excluded.uses;
END;
CREATE INDEX IF NOT EXISTS reader_batches_open ON batches (run_id) WHERE status IN ('reserved', 'prepared');
"""

_PICKS = """
CREATE TABLE IF NOT EXISTS reader_picks (
    batch_id TEXT NOT NULL, position INTEGER NOT NULL, experience_id TEXT NOT NULL, weight REAL NOT NULL,
    PRIMARY KEY (batch_id, position)
) WITHOUT ROWID;
"""


def has(connection: Connection, table: str) -> bool:
    """Whether the catalog has this table."""
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return connection.execute(query, (table,)).fetchone() is not None


def need_index(connection: Connection) -> None:
    """Make the tables of the index of ready groups and the triggers that note changes."""
    _make(connection, "reader_dirty", _DIRTY)


def need_counts(connection: Connection) -> None:
    """Make and fill the counts of kept rows and uses, and the triggers that keep them."""
    _make(connection, "reader_counts", _COUNTS)


def need_picks(connection: Connection) -> None:
    """Make the table of reservations whose order or weights are not those of arrival."""
    _make(connection, "reader_picks", _PICKS)


def statements(script: str) -> Iterator[str]:
    """The statements of a script, triggers whole."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _make(connection: Connection, table: str, script: str) -> None:
    if has(connection, table):
        return
    # not executescript, which would commit the transaction that this belongs to
    for statement in statements(script):
        connection.execute(statement)
