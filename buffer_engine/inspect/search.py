"""Full-text search over the messages of rollouts: SQLite's FTS5 beside the store.

DuckDB's own extension for this cannot be loaded without a network, FTS5 comes with Python. The index is derived data:
`search.sqlite` in the store's folder may be deleted at any time and is made again by the next search. It follows the
store by commit order, so a search costs what was written since the last one. Where the folder cannot be written, the
index is made in memory.

A document is one distinct text; equal messages (prompts of siblings, most of all) are indexed once. Ranking is BM25.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from buffer_engine.inspect.source import Source
from buffer_engine.inspect.statements import QueryError
from buffer_engine.store.layout import SEARCH_INDEX

HITS = pa.schema(
    [
        pa.field("asked", pa.string(), nullable=False),
        pa.field("experience_id", pa.string(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("role", pa.string(), nullable=False),
        pa.field("relevance", pa.float64(), nullable=False),
        pa.field("snippet", pa.string(), nullable=False),
    ]
)
"""What a search finds: one row per message. `relevance` is BM25, higher is better; `snippet` marks the words [so]."""

_LAYOUT = 1
_ROWS_A_TRANSACTION = 50_000
_BUSY_SECONDS = 60.0
_SNIPPET_TOKENS = 24
_MAKE = """
CREATE TABLE progress (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE texts (text_id INTEGER PRIMARY KEY, hash BLOB NOT NULL UNIQUE, content TEXT NOT NULL);
CREATE TABLE places (
    text_id INTEGER NOT NULL, ordinal INTEGER NOT NULL, position INTEGER NOT NULL, role TEXT NOT NULL,
    PRIMARY KEY (text_id, ordinal, position)
) WITHOUT ROWID;
CREATE INDEX places_of_row ON places (ordinal);
CREATE TABLE ids (ordinal INTEGER PRIMARY KEY, experience_id TEXT NOT NULL);
CREATE VIRTUAL TABLE words USING fts5(
    content, content='texts', content_rowid='text_id', tokenize="unicode61 remove_diacritics 2"
);
"""


class SearchIndex:
    """The index of one source. `ordinal` is a rollout's place in the order of commit."""

    def __init__(self, source: Source, folder: Path | None) -> None:
        """Open the index in `folder`, or one in memory when that is None or cannot be written.

        Raises:
            QueryError: the file is damaged; says what to do.
        """
        self._source = source
        on_disk = folder is not None and os.access(folder, os.W_OK | os.X_OK)
        self._path = folder / SEARCH_INDEX if on_disk and folder is not None else None
        self._connection = sqlite3.connect(
            ":memory:" if self._path is None else self._path, timeout=_BUSY_SECONDS, isolation_level=None
        )
        with self._explained():
            self._connection.execute("PRAGMA journal_mode = WAL")
            # What is erased must not stay in free pages.
            self._connection.execute("PRAGMA secure_delete = ON")
            self._connection.execute("PRAGMA synchronous = NORMAL")

    def find(self, words: str, *, rows: int) -> pa.Table:
        """All messages of the first `rows` rollouts that match, most relevant first (`HITS`).

        Args:
            words: FTS5's language: words must all occur; "as written", OR, NOT, NEAR(…), begin*.
        Raises:
            QueryError: `words` is empty or cannot be understood.
        """
        if not words.strip():
            raise QueryError("search for what? Write words, for instance search('gradient OR \"chain rule\"')")
        with self._explained():
            self._catch_up()
            try:
                found = self._connection.execute(
                    "WITH matched AS MATERIALIZED ("
                    f"  SELECT rowid AS text_id, -bm25(words) AS relevance, snippet(words, 0, '[', ']', '…', "
                    f"  {_SNIPPET_TOKENS}) AS snippet FROM words WHERE words MATCH ?"
                    ") "
                    "SELECT ids.experience_id, places.position, places.role, matched.relevance, matched.snippet "
                    "FROM matched CROSS JOIN places USING (text_id) CROSS JOIN ids USING (ordinal) "
                    "WHERE places.ordinal < ? ORDER BY matched.relevance DESC, places.ordinal, places.position",
                    (words, rows),
                ).fetchall()
            except sqlite3.OperationalError as error:
                if _is_about_words(error):
                    raise not_understood(words, error) from error
                raise
        columns = list(zip(*found, strict=True)) if found else [()] * (len(HITS) - 1)
        arrays = [
            pa.repeat(words, len(found)),
            *(pa.array(column, field.type) for column, field in zip(columns, list(HITS)[1:], strict=True)),
        ]
        return pa.table(arrays, schema=HITS)

    def close(self) -> None:
        """Close the index."""
        self._connection.close()

    # ---- keeping up

    def _catch_up(self) -> None:
        """Index what was written since, in pieces; each piece is a transaction of its own and is kept."""
        while not self._catch_up_a_piece():
            pass

    def _catch_up_a_piece(self) -> bool:
        """True when nothing is left to do."""
        # Tables in memory have one version, which is not counted.
        version = 1 if self._source.version is None else self._source.version
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self._make_if_foreign()
            self._drop_erased()
            progress = self._progress()
            if progress["version"] >= version:
                self._connection.execute("COMMIT")
                return True
            done = self._add(version, progress)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        return done

    def _add(self, version: int, progress: dict[str, int]) -> bool:
        skipped = progress["rows"] - progress["rows_then"]
        ordinal = progress["rows"]
        batches = self._source.rows("rollouts", after=progress["version"], columns=["experience_id", "messages"])
        for batch in _after(batches, skipped):
            self._add_batch(batch, first=ordinal)
            ordinal += batch.num_rows
            if ordinal - progress["rows"] >= _ROWS_A_TRANSACTION:
                self._note(rows=ordinal)
                return False
        self._note(rows=ordinal, rows_then=ordinal, version=version)
        return True

    def _add_batch(self, batch: pa.RecordBatch, *, first: int) -> None:
        count = batch.num_rows
        ids = batch.column("experience_id").to_pylist()
        self._connection.executemany(
            "INSERT INTO ids VALUES (?, ?)", zip(range(first, first + count), ids, strict=True)
        )
        messages = batch.column("messages")
        lengths = messages.value_lengths().fill_null(0).to_numpy()
        flat = messages.flatten()
        contents = flat.field("content").dictionary_encode()
        # One look-up per distinct text of the batch: siblings share their prompts.
        text_ids = np.array([self._text(text) for text in contents.dictionary.to_pylist()], dtype=np.int64)
        codes = contents.indices.fill_null(-1).to_numpy()
        rows = np.repeat(np.arange(first, first + count), lengths)
        positions = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        there = codes >= 0
        roles = np.array(flat.field("role").to_pylist(), dtype=object)
        self._connection.executemany(
            "INSERT INTO places VALUES (?, ?, ?, ?)",
            zip(
                text_ids[codes[there]].tolist(), rows[there].tolist(), positions[there].tolist(),
                roles[there].tolist(), strict=True,
            ),
        )  # fmt: skip

    def _text(self, content: str) -> int:
        key = xxhash.xxh3_128_digest(content.encode("utf-8", "surrogatepass"))
        known = self._connection.execute("SELECT text_id FROM texts WHERE hash = ?", (key,)).fetchone()
        if known is not None:
            return int(known[0])
        made = self._connection.execute("INSERT INTO texts (hash, content) VALUES (?, ?)", (key, content)).lastrowid
        assert made is not None
        self._connection.execute("INSERT INTO words (rowid, content) VALUES (?, ?)", (made, content))
        return made

    # ---- what no longer holds

    def _make_if_foreign(self) -> None:
        """Begin anew when the index is empty, of another layout, or of other rows.

        Those of another store, of one put back from a copy, or before damage was found: then ordinals are others.
        """
        (tables,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and self._is_ours():
            return
        for (name,) in self._connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' "
            "AND name IN ('words', 'progress', 'texts', 'places', 'ids')"
        ).fetchall():
            self._connection.execute(f"DROP TABLE {name}")
        for statement in _MAKE.split(";\n"):
            self._connection.execute(statement)
        self._note(layout=_LAYOUT, version=0, rows=0, rows_then=0, erased=0, damaged=self._source.damaged())

    def _is_ours(self) -> bool:
        progress = self._progress()
        if progress.get("layout") != _LAYOUT or progress.get("damaged") != self._source.damaged():
            return False
        last = self._connection.execute("SELECT experience_id FROM ids ORDER BY ordinal DESC LIMIT 1").fetchone()
        return self._source.holds(version=progress["version"], experience_id=None if last is None else last[0])

    def _drop_erased(self) -> None:
        """Take out rows whose payload a retention rule took away, words included."""
        erased = self._source.erased()
        if len(erased) == self._progress()["erased"]:
            return
        execute = self._connection.execute
        execute("CREATE TEMP TABLE gone (experience_id TEXT PRIMARY KEY)")
        self._connection.executemany("INSERT OR IGNORE INTO gone VALUES (?)", ((one,) for one in erased))
        execute("DELETE FROM places WHERE ordinal IN (SELECT ordinal FROM ids WHERE experience_id IN gone)")
        orphans = "FROM texts WHERE text_id NOT IN (SELECT text_id FROM places)"
        execute(f"INSERT INTO words (words, rowid, content) SELECT 'delete', text_id, content {orphans}")
        execute(f"DELETE {orphans}")
        # A deletion in FTS5 is a note beside the words; only merging everything takes them out of the file.
        execute("INSERT INTO words (words) VALUES ('optimize')")
        execute("DROP TABLE gone")
        self._note(erased=len(erased))

    def _progress(self) -> dict[str, int]:
        return dict(self._connection.execute("SELECT key, value FROM progress").fetchall())

    def _note(self, **values: int) -> None:
        self._connection.executemany("INSERT OR REPLACE INTO progress VALUES (?, ?)", values.items())

    def _explained(self) -> _Explained:
        return _Explained(self._path)


class _Explained:
    """Tells what is wrong with the index file, and that it can be deleted."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, sqlite3.DatabaseError):
            raise QueryError(
                f"{self._path or 'the search index in memory'}: the search index cannot be used ({error}); it holds "
                "nothing of its own: delete the file, and the next search makes it again"
            ) from error


def not_understood(words: str, error: sqlite3.Error) -> QueryError:
    """The refusal of a search that FTS5 cannot read, with the way to write it."""
    quoted = '"' + words.replace('"', '""') + '"'
    return QueryError(
        f"the search {words!r} cannot be understood ({error}). Words must all occur; OR, NOT and brackets combine "
        "them, begin* stands for words that begin so. Signs need double quotes, which look for the words as written: "
        f"{quoted}"
    )


def _is_about_words(error: sqlite3.OperationalError) -> bool:
    text = str(error)
    return text.startswith(("fts5:", "no such column:", "unterminated string", "unknown special query"))


def _after(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The batches without their first `rows` rows."""
    for batch in batches:
        if rows >= batch.num_rows:
            rows -= batch.num_rows
            continue
        yield batch.slice(rows)
        rows = 0
