"""Everything that can be checked about a store, checked: bytes, lengths, keys, files, then references and counts.

Findings are reported, never raised, and one damaged frame does not end the search.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from itertools import groupby

import pyarrow as pa

from buffer_engine.errors import CorruptSegmentError, SchemaError
from buffer_engine.schema import TABLES, TableSpec
from buffer_engine.store import index, keyblocks, ledger
from buffer_engine.store.base import Finding
from buffer_engine.store.catalog import Catalog
from buffer_engine.store.content import row_hashes
from buffer_engine.store.damage import quarantined_ids
from buffer_engine.store.layout import StoreLayout
from buffer_engine.store.media import LocalMediaFiles, MediaAudit
from buffer_engine.store.reading import Frame, SegmentReader, frames_of
from buffer_engine.store.validate import conform

Indexed = tuple[int, index.Key, bytes]
"""(row in frame, key, content hash) as the catalog has it; where keys lie in blocks, their hashes and no content."""


class Verifier:
    """One pass over a store, with maps of its own so that every frame is read and hashed again."""

    def __init__(self, layout: StoreLayout, catalog: Catalog) -> None:
        self._layout = layout
        self._catalog = catalog
        self._connection = catalog.read()
        self._reader = SegmentReader(layout, catalog)
        self._book = ledger.Ledger()
        self._held: set[int] = set()
        self._media = MediaAudit(LocalMediaFiles(layout.root))

    def findings(self) -> list[Finding]:
        """All findings at one catalog version; empty means sound."""
        files = self._layout.segment_files()  # before the snapshot: a segment begun later is then in neither
        with self._catalog.snapshot():
            self._held = quarantined_ids(self._connection)
            found = list(_catalog_findings(self._connection))
            found += _file_findings(self._connection, self._layout, files)
            for spec in TABLES.values():
                found += self._table_findings(spec)
            found += self._book.findings(self._connection)
            found += self._media.findings()
        self._reader.close()
        return found

    def _table_findings(self, spec: TableSpec) -> Iterator[Finding]:
        indexed = _index_by_frame(self._connection, spec)
        try:
            expected = next(indexed, None)
        except CorruptSegmentError as error:  # a block of keys
            yield Finding("catalog", "catalog.sqlite", str(error))
            expected = None
        for frame in frames_of(self._connection, spec.name):
            while expected is not None and expected[0] < frame.frame_id:
                yield _lost_rows(spec, expected)
                expected = next(indexed, None)
            rows: list[Indexed] = []
            if expected is not None and expected[0] == frame.frame_id:
                rows = expected[1]
                expected = next(indexed, None)
            yield from self._frame_findings(spec, frame, rows)
        while expected is not None:
            yield _lost_rows(spec, expected)
            expected = next(indexed, None)

    def _frame_findings(self, spec: TableSpec, frame: Frame, rows: list[Indexed]) -> Iterator[Finding]:
        where = f"segments/{frame.segment}@{frame.offset}"
        try:
            batch = self._reader.batch(frame)
        except CorruptSegmentError as error:
            self._book.damaged.add(spec.name)
            path = self._layout.segment(frame.segment)
            whole = path.exists() and path.stat().st_size >= frame.offset + frame.length
            known = " (in quarantine: reads go on without it)" if frame.frame_id in self._held else ""
            yield Finding("checksum" if whole else "torn", where, f"{error}{known}")
            return
        if frame.frame_id in self._held:
            said = "in quarantine, and its bytes are sound again: `buffer-engine store recheck` takes it back"
            yield Finding("quarantine", where, said)
        if batch.num_rows != frame.rows:
            yield Finding("catalog", where, f"the catalog says {frame.rows} rows, the frame has {batch.num_rows}")
        try:
            conform(spec, pa.Table.from_batches([batch]))
        except SchemaError as error:
            yield Finding("length", where, str(error))
        if spec.key:
            found = _indexed(spec, batch)
            gone = _erased(self._connection, batch) if spec is TABLES["rollouts"] else {}
            for at, tokens in gone.items():
                if tokens:
                    yield Finding(
                        "catalog", where, f"row {found[at][1]} is recorded as erased and still has {tokens} tokens"
                    )
            wrong = [
                (have, want)
                for have, want in zip(found, rows, strict=False)
                if have != want and not (have[0] in gone and have[:2] == want[:2])
            ]
            if len(found) != len(rows):
                yield Finding("catalog", where, f"the frame has {len(found)} rows, the index {len(rows)} for it")
            elif wrong:
                (_, key, _), (_, other, _) = wrong[0]
                yield Finding("catalog", where, f"{len(wrong)} index rows differ; stored {key}, indexed {other}")
        self._book.read(spec, batch)
        self._media.read(spec, batch)


def _indexed(spec: TableSpec, batch: pa.RecordBatch) -> list[Indexed]:
    """What the catalog should have for the rows of a frame."""
    if spec.name in keyblocks.BLOCKED:
        owners, tags = keyblocks.fingerprints(keyblocks.key_columns(spec, batch))
        return [(row, key, b"") for row, key in enumerate(zip(owners.tolist(), tags.tolist(), strict=True))]
    keys, contents = index.keys_of(spec, batch), row_hashes(spec, batch)
    return list(zip(range(batch.num_rows), keys, contents, strict=True))


def _index_by_frame(connection: sqlite3.Connection, spec: TableSpec) -> Iterator[tuple[int, list[Indexed]]]:
    if not spec.key:
        return
    if spec.name in keyblocks.BLOCKED:
        for frame_id, rows in groupby(keyblocks.entries(connection, spec.name), key=lambda row: row[0]):
            yield frame_id, [(row[1], tuple(row[2:]), b"") for row in rows]
        return
    found = connection.execute(
        f"SELECT frame_id, row, content, {', '.join(spec.key)} FROM index_{spec.name} ORDER BY frame_id, row"
    )
    for frame_id, rows in groupby(found, key=lambda row: row[0]):
        yield frame_id, [(row[1], tuple(row[3:]), row[2]) for row in rows]


def _erased(connection: sqlite3.Connection, batch: pa.RecordBatch) -> dict[int, int]:
    """Rows of a frame whose payload was erased, by place, with the tokens that they still have."""
    ids: list[str] = batch.column("experience_id").to_pylist()
    found = connection.execute(
        "SELECT experience_id FROM index_erasures WHERE experience_id IN (SELECT value FROM json_each(?))",
        (json.dumps(ids),),
    )
    erased = {row[0] for row in found}
    return {at: len(batch.column("token_ids")[at]) for at, one in enumerate(ids) if one in erased}


def _lost_rows(spec: TableSpec, expected: tuple[int, list[Indexed]]) -> Finding:
    frame_id, rows = expected
    return Finding("catalog", spec.name, f"{len(rows)} indexed rows lie in frame {frame_id}, which the catalog lacks")


def _catalog_findings(connection: sqlite3.Connection) -> Iterator[Finding]:
    for (message,) in connection.execute("PRAGMA integrity_check(10)").fetchall():
        if message != "ok":
            yield Finding("catalog", "catalog.sqlite", message)
    for tbl, segment_id in connection.execute(
        "SELECT DISTINCT tbl, segment_id FROM frames WHERE segment_id NOT IN (SELECT segment_id FROM segments)"
    ).fetchall():
        yield Finding("catalog", str(tbl), f"frames lie in segment {segment_id}, which the catalog lacks")
    overlaps = connection.execute(
        "SELECT s.name, f.frame_id, f.before, f.offset FROM (SELECT frame_id, segment_id, offset, "
        "lag(offset + length) OVER (PARTITION BY segment_id ORDER BY offset) AS before FROM frames) f "
        "JOIN segments s USING (segment_id) WHERE f.offset < f.before"
    )
    for name, frame_id, before, offset in overlaps.fetchall():
        yield Finding(
            "catalog", f"segments/{name}@{offset}", f"frame {frame_id} begins before {before}, inside another"
        )


def _file_findings(connection: sqlite3.Connection, layout: StoreLayout, files: list[str]) -> Iterator[Finding]:
    known = {row[0] for row in connection.execute("SELECT name FROM segments")}
    for name in files:
        # one that compaction removed since it was seen is none
        if name not in known and layout.segment(name).exists():
            yield Finding("orphan", f"segments/{name}", "the catalog does not know this file; nothing in it is visible")
