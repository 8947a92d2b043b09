"""The catalog's tables as SQL, and the steps that bring an older catalog to them.

A statement here is the truth about a schema version: change one only together with `SCHEMA_VERSION`, a migration and a
fixture store of the version left behind.
"""

from __future__ import annotations

from collections.abc import Callable

from buffer_engine.schema import SCHEMA_VERSION, TABLES, TableSpec
from buffer_engine.store.connection import Connection
from buffer_engine.store.keyblocks import BLOCKED, take_over

APPLICATION_ID = 0x42664531  # "BfE1"

_COMMON = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('version', 0);
CREATE TABLE segments (
    segment_id INTEGER PRIMARY KEY, tbl TEXT NOT NULL, name TEXT NOT NULL UNIQUE, writer TEXT NOT NULL,
    head INTEGER NOT NULL, head_xxh3 INTEGER NOT NULL, format TEXT NOT NULL DEFAULT 'arrows', retired_at REAL
);
CREATE TABLE frames (
    frame_id INTEGER PRIMARY KEY, tbl TEXT NOT NULL, segment_id INTEGER NOT NULL REFERENCES segments,
    offset INTEGER NOT NULL, length INTEGER NOT NULL, rows INTEGER NOT NULL,
    version INTEGER NOT NULL, xxh3 INTEGER NOT NULL
);
CREATE INDEX frames_of_table ON frames (tbl, version, frame_id);
CREATE TABLE cursors (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE runs (run_id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE batches (
    batch_id TEXT PRIMARY KEY, run_id TEXT NOT NULL, status TEXT NOT NULL, step INTEGER, rows INTEGER NOT NULL,
    model_version INTEGER NOT NULL, reserved_at REAL NOT NULL, expires_at REAL NOT NULL, committed_at REAL
);
CREATE INDEX batches_of_run ON batches (run_id, step);
CREATE INDEX batches_reserved ON batches (expires_at) WHERE status = 'reserved';
CREATE TABLE batch_history (
    entry INTEGER PRIMARY KEY, version INTEGER NOT NULL, batch_id TEXT NOT NULL, run_id TEXT NOT NULL,
    status TEXT NOT NULL, step INTEGER, rows INTEGER NOT NULL, reserved_at REAL NOT NULL, committed_at REAL, held TEXT
);
CREATE TABLE index_rollouts (
    sequence INTEGER PRIMARY KEY, experience_id TEXT NOT NULL UNIQUE,
    frame_id INTEGER NOT NULL, row INTEGER NOT NULL, content BLOB NOT NULL,
    run_id TEXT NOT NULL, task_id TEXT NOT NULL, group_id TEXT NOT NULL, group_size INTEGER NOT NULL,
    attempt INTEGER NOT NULL, sample_index INTEGER NOT NULL, turn_index INTEGER NOT NULL,
    partition TEXT NOT NULL, model_version INTEGER, failed INTEGER NOT NULL, group_first INTEGER NOT NULL,
    status TEXT NOT NULL DEFAULT 'new', uses INTEGER NOT NULL DEFAULT 0, reserved_by TEXT, trained_step INTEGER
);
CREATE INDEX rollouts_of_group ON index_rollouts (run_id, group_id);
CREATE INDEX rollouts_kept ON index_rollouts (run_id, partition, uses, group_first, group_id) WHERE status = 'kept';
CREATE INDEX rollouts_reserved ON index_rollouts (reserved_by) WHERE reserved_by IS NOT NULL;
CREATE TABLE index_tasks (
    task_id TEXT PRIMARY KEY, frame_id INTEGER NOT NULL, row INTEGER NOT NULL, content BLOB NOT NULL,
    partition TEXT NOT NULL, prompt_hash TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX tasks_of_prompt ON index_tasks (prompt_hash, partition);
"""


_V2 = """
CREATE TABLE chunks (
    segment_id INTEGER NOT NULL REFERENCES segments, number INTEGER NOT NULL, first INTEGER NOT NULL,
    rows INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL, xxh3 INTEGER NOT NULL,
    PRIMARY KEY (segment_id, number)
) WITHOUT ROWID;
CREATE TABLE key_blocks (
    block_id INTEGER PRIMARY KEY, tbl TEXT NOT NULL, level INTEGER NOT NULL, rows INTEGER NOT NULL,
    xxh3 INTEGER NOT NULL, keys BLOB NOT NULL
);
CREATE INDEX key_blocks_of_table ON key_blocks (tbl, level, block_id, xxh3);
CREATE TABLE quarantine (frame_id INTEGER PRIMARY KEY, found_at REAL NOT NULL, message TEXT NOT NULL);
CREATE TABLE quarantined_rollouts (sequence INTEGER PRIMARY KEY, frame_id INTEGER NOT NULL);
"""


def index_ddl(spec: TableSpec) -> str:
    """SQL that makes the index of a table with a key."""
    kinds = {"string": "TEXT", "int32": "INTEGER", "int64": "INTEGER"}
    columns = ", ".join(f"{name} {kinds[str(spec.schema.field(name).type)]} NOT NULL" for name in spec.key)
    return (
        f"CREATE TABLE index_{spec.name} ({columns}, frame_id INTEGER NOT NULL, row INTEGER NOT NULL, "
        f"content BLOB NOT NULL, PRIMARY KEY ({', '.join(spec.key)})) WITHOUT ROWID"
    )


def catalog_ddl() -> list[str]:
    """Statements that make an empty catalog of the current schema version."""
    other = ("rollouts", "tasks", *BLOCKED)
    indexes = [index_ddl(spec) for spec in TABLES.values() if spec.key and spec.name not in other]
    return [*_statements(_COMMON), *_statements(_V2), *indexes]


def _statements(script: str) -> list[str]:
    return [statement.strip() for statement in script.split(";") if statement.strip()]


def migrate(connection: Connection) -> int | None:
    """Bring a catalog of ours to the current schema version in one transaction; the version it had, None if current.

    Segments are never rewritten: a column added later reads as null in rows written before.
    """
    before = _migratable(connection)
    if before is None:
        return None
    connection.execute("BEGIN IMMEDIATE")
    try:
        before = _migratable(connection)  # another process may have migrated it while this one waited
        if before is not None:
            for version in range(before, SCHEMA_VERSION):
                for statement in _MIGRATIONS[version]():
                    connection.execute(statement)
                if version == 1:
                    take_over(connection)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return before


def _migratable(connection: Connection) -> int | None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    return int(found) if application == APPLICATION_ID and found in _MIGRATIONS else None


def _from_1() -> list[str]:
    """Version 2: Parquet segments, keys in blocks, quarantine, per-token statistics, media and erasures."""
    return [
        "ALTER TABLE segments ADD COLUMN format TEXT NOT NULL DEFAULT 'arrows'",
        "ALTER TABLE segments ADD COLUMN retired_at REAL",
        *_statements(_V2),
        *(index_ddl(TABLES[name]) for name in ("token_stats", "media", "erasures")),
    ]


_MIGRATIONS: dict[int, Callable[[], list[str]]] = {1: _from_1}
"""By the version that a statement list leaves behind."""
