"""Everything that can be checked about a store, checked: bytes, lengths, keys, files, then references and counts.

Findings are reported, never raised, and one damaged frame does not end the search.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby

import pyarrow as pa

from buffer_engine.errors import CorruptSegmentError, SchemaError
from buffer_engine.schema import TABLES, TableSpec
from buffer_engine.store import audit, index, keyblocks, ledger
from buffer_engine.store.base import Finding
from buffer_engine.store.catalog import Catalog
from buffer_engine.store.connection import Connection, stream
from buffer_engine.store.content import row_hashes
from buffer_engine.store.damage import quarantined_ids
from buffer_engine.store.files import SegmentFiles
from buffer_engine.store.media import MediaAudit
from buffer_engine.store.parts import Parts
from buffer_engine.store.reading import Frame, SegmentReader, frames_of
from buffer_engine.store.validate import conform

Indexed = tuple[int, index.Key, bytes]
"""(row in frame, key, content hash) as the catalog has it; where keys lie in blocks, their hashes and no content."""


class Verifier:
    """One pass over a store, with maps of its own so that every frame is read and hashed again."""

    def __init__(self, parts: Parts) -> None:
        """Check what these parts give; see `Parts.afresh`."""
        self._files = parts.files
        self._catalog = parts.catalog
        self._connection = parts.catalog.read()
        self._reader = SegmentReader(parts.layout, parts.catalog, parts.files)
        self._book = ledger.Ledger()
        self._held: set[int] = set()
        self._media = MediaAudit(parts.media)

    def findings(self) -> list[Finding]:
        """All findings at one catalog version; empty means sound."""
        files = self._files.names()  # before the snapshot: a segment begun later is then in neither
        with self._catalog.snapshot():
            self._held = quarantined_ids(self._connection)
            found = list(_readable("the catalog's pages", _page_findings(self._catalog, self._connection)))
            if not self._catalog.shared:  # a server watches over its tables itself
                found += _readable("the catalog's shape", audit.shape_findings(self._connection))
            found += _readable("the catalog against itself", audit.catalog_findings(self._connection))
            found += _readable("the files", self._file_findings(files))
            for spec in TABLES.values():
                found += _readable(spec.name, self._table_findings(spec))
            found += _readable("the accounts", self._book.findings(self._connection))
            found += _readable("media", self._media.findings())
        self._reader.close()
        return found

    def _file_findings(self, files: list[str]) -> Iterator[Finding]:
        known = _listed(self._connection)
        unknown = [name for name in files if name not in known]
        if not unknown:
            return
        # one that compaction removed since it was seen is none, nor an object that was put before the snapshot and
        # listed after it
        there = set(self._files.names())
        with self._catalog.fresh() as connection:
            known = _listed(connection)
        for name in unknown:
            if name in there and name not in known:
                yield Finding(
                    "orphan", f"segments/{name}", "the catalog does not know this file; nothing in it is visible"
                )

    def _table_findings(self, spec: TableSpec) -> Iterator[Finding]:
        indexed = _index_by_frame(self._connection, spec)
        try:
            expected = next(indexed, None)
        except CorruptSegmentError as error:  # a block of keys
            yield Finding("catalog", self._catalog.called, str(error))
            expected = None
        for frame in self._reader.ahead(frames_of(self._connection, spec.name)):
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
            gone = _erased(self._connection, batch) if spec is TABLES["rollouts"] else {}
            found = _indexed(spec, batch, gone)
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


def _readable(what: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings; what a damaged catalog makes of a check is one more, and does not keep others from running."""
    try:
        yield from findings
    except Exception as error:  # noqa: BLE001 - names that do not exist, texts that are none, blobs of another size …
        yield Finding("catalog", what, f"it could not be checked to its end ({type(error).__name__}: {error})")


def _indexed(spec: TableSpec, batch: pa.RecordBatch, erased: Mapping[int, int]) -> list[Indexed]:
    """What the catalog should have for the rows of a frame."""
    if spec.name in keyblocks.BLOCKED:
        owners, tags = keyblocks.fingerprints(keyblocks.key_columns(spec, batch))
        return [(row, key, b"") for row, key in enumerate(zip(owners.tolist(), tags.tolist(), strict=True))]
    columns = [batch.column(name).to_pylist() for name in _looked_up(spec)]
    if spec.name == "rollouts":  # an erased row must not train either
        bad = batch.column("error").is_valid().to_pylist()
        columns.append([int(failed or at in erased) for at, failed in enumerate(bad)])
    return list(zip(range(batch.num_rows), zip(*columns, strict=True), row_hashes(spec, batch), strict=True))


def _looked_up(spec: TableSpec) -> tuple[str, ...]:
    """The key, and the other columns that the index has from the row; `failed` comes after them for rollouts."""
    more = {"rollouts": index.ROLLOUT_COLUMNS[1:], "tasks": ("partition", "prompt_hash")}
    return (*spec.key, *more.get(spec.name, ()))


def _listed(connection: Connection) -> set[str]:
    return {row[0] for row in connection.execute("SELECT name FROM segments").fetchall()}


def _is_whole(files: SegmentFiles, frame: Frame) -> bool:
    try:
        return files.local(frame.segment).stat().st_size >= frame.offset + frame.length
    except FileNotFoundError:
        return False


def _index_by_frame(connection: Connection, spec: TableSpec) -> Iterator[tuple[int, list[Indexed]]]:
    if not spec.key:
        return
    if spec.name in keyblocks.BLOCKED:
        for frame_id, rows in groupby(keyblocks.entries(connection, spec.name), key=lambda row: row[0]):
            yield frame_id, [(row[1], tuple(row[2:]), b"") for row in rows]
        return
    columns = [*_looked_up(spec), *(["failed"] if spec.name == "rollouts" else [])]
    found = stream(
        connection,
        f"SELECT frame_id, row, content, {', '.join(columns)} FROM index_{spec.name} ORDER BY frame_id, row",
    )
    for frame_id, rows in groupby(found, key=lambda row: row[0]):
        yield frame_id, [(row[1], tuple(row[3:]), row[2]) for row in rows]


def _erased(connection: Connection, batch: pa.RecordBatch) -> dict[int, int]:
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


def _page_findings(catalog: Catalog, connection: Connection) -> Iterator[Finding]:
    for message in catalog.problems():
        yield Finding("catalog", catalog.called, message)
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
