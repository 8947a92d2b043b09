"""Everything that can be checked about a store, checked: bytes, lengths, keys, files, then references and counts.

Findings are reported, never raised, and one damaged frame does not end the search.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import pyarrow as pa

from buffer_engine.errors import CorruptSegmentError, SchemaError
from buffer_engine.schema import TABLES, TableSpec
from buffer_engine.store import index, ledger
from buffer_engine.store.base import Finding
from buffer_engine.store.catalog import Catalog
from buffer_engine.store.connection import Connection, stream
from buffer_engine.store.content import row_hashes
from buffer_engine.store.files import SegmentFiles
from buffer_engine.store.layout import StoreLayout
from buffer_engine.store.reading import Frame, SegmentReader, frames_of
from buffer_engine.store.validate import conform

Indexed = tuple[int, index.Key, bytes]
"""(row in frame, key, content hash) as the catalog has it."""


class Verifier:
    """One pass over a store, with maps of its own so that every frame is read and hashed again."""

    def __init__(self, layout: StoreLayout, catalog: Catalog, files: SegmentFiles) -> None:
        self._layout = layout
        self._files = files
        self._catalog = catalog
        self._connection = catalog.read()
        self._reader = SegmentReader(layout, files)
        self._book = ledger.Ledger()

    def findings(self) -> list[Finding]:
        """All findings at one catalog version; empty means sound."""
        files = self._files.names()  # before the snapshot: a segment begun later is then in neither
        with self._catalog.snapshot():
            found = [Finding("catalog", "catalog", message) for message in self._catalog.problems()]
            found += _catalog_findings(self._connection)
            found += _file_findings(self._connection, files)
            for spec in TABLES.values():
                found += self._table_findings(spec)
            found += self._book.findings(self._connection)
        self._reader.close()
        return found

    def _table_findings(self, spec: TableSpec) -> Iterator[Finding]:
        indexed = _index_by_frame(self._connection, spec)
        expected = next(indexed, None)
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
            whole = _is_whole(self._files, frame)
            yield Finding("checksum" if whole else "torn", where, str(error))
            return
        if batch.num_rows != frame.rows:
            yield Finding("catalog", where, f"the catalog says {frame.rows} rows, the frame has {batch.num_rows}")
        try:
            conform(spec, pa.Table.from_batches([batch]))
        except SchemaError as error:
            yield Finding("length", where, str(error))
        if spec.key:
            keys, contents = index.keys_of(spec, batch), row_hashes(spec, batch)
            found = list(zip(range(batch.num_rows), keys, contents, strict=True))
            wrong = [(have, want) for have, want in zip(found, rows, strict=False) if have != want]
            if len(found) != len(rows):
                yield Finding("catalog", where, f"the frame has {len(found)} rows, the index {len(rows)} for it")
            elif wrong:
                (_, key, _), (_, other, _) = wrong[0]
                yield Finding("catalog", where, f"{len(wrong)} index rows differ; stored {key}, indexed {other}")
        self._book.read(spec, batch)


def _is_whole(files: SegmentFiles, frame: Frame) -> bool:
    try:
        return files.local(frame.segment).stat().st_size >= frame.offset + frame.length
    except FileNotFoundError:
        return False


def _index_by_frame(connection: Connection, spec: TableSpec) -> Iterator[tuple[int, list[Indexed]]]:
    if not spec.key:
        return
    columns = ", ".join(("frame_id", "row", "content", *spec.key))
    found = stream(connection, f"SELECT {columns} FROM index_{spec.name} ORDER BY frame_id, row")
    for frame_id, rows in groupby(found, key=lambda row: row[0]):
        yield frame_id, [(row[1], tuple(row[3:]), row[2]) for row in rows]


def _lost_rows(spec: TableSpec, expected: tuple[int, list[Indexed]]) -> Finding:
    frame_id, rows = expected
    return Finding("catalog", spec.name, f"{len(rows)} indexed rows lie in frame {frame_id}, which the catalog lacks")


def _catalog_findings(connection: Connection) -> Iterator[Finding]:
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


def _file_findings(connection: Connection, files: list[str]) -> Iterator[Finding]:
    known = {row[0] for row in connection.execute("SELECT name FROM segments")}
    for name in files:
        if name not in known:
            yield Finding("orphan", f"segments/{name}", "the catalog does not know this file; nothing in it is visible")
