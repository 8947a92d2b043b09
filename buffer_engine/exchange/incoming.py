"""Rows of files into a store: checked one by one, taken once however often the file is imported.

With `refuse` a file is read to its end before anything of it is stored, so a bad row leaves the store as it was. With
`skip` bad rows are passed over, counted, and noted in `events`. Rows with a key are recognised by it; those without
(metrics, events) by the content of their file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import pyarrow as pa

from buffer_engine.errors import ExchangeError, KeyConflictError, PartitionError, SchemaError, UsageError
from buffer_engine.exchange.json_rows import Bad
from buffer_engine.exchange.sources import Chunk, SourceFile
from buffer_engine.schema import EVENTS, TableSpec
from buffer_engine.store.base import ExperienceStore
from buffer_engine.store.media import MEDIA_FOLDER, media_path
from buffer_engine.store.validate import conform

OnInvalid = Literal["refuse", "skip"]
Advance = Callable[[int], None]
SHOWN = 10
"""Bad rows listed in an error; all of them are counted."""

NOT_ALONE = {
    "batches": "what a batch reserved and trained is bookkeeping that",
    "batch_rows": "what a batch reserved and trained is bookkeeping that",
    "token_stats": "it belongs to batches, and what these trained is bookkeeping that",
    "erasures": "an erasure takes payload away, which",
}
"""Tables whose rows mean nothing without the rest of their store."""

_REFUSALS = (SchemaError, KeyConflictError, PartitionError)


@dataclass(slots=True)
class ImportReceipt:
    """What an import did, in rows.

    Attributes:
        added, unchanged: rows per table that are new, and that were stored before with the same content.
        skipped: rows per table that were passed over; `reasons` says why, the first ones in full.
    """

    added: dict[str, int] = field(default_factory=dict[str, int])
    unchanged: dict[str, int] = field(default_factory=dict[str, int])
    skipped: dict[str, int] = field(default_factory=dict[str, int])
    reasons: list[str] = field(default_factory=list[str])

    def count(self, counts: dict[str, int], table: str, rows: int) -> None:
        """Add to one of the counts."""
        counts[table] = counts.get(table, 0) + rows


class Importer:
    """Imports files into one store."""

    def __init__(
        self,
        store: ExperienceStore,
        *,
        on_invalid: OnInvalid = "refuse",
        run_id: str = "import",
        dry_run: bool = False,
        advance: Advance = lambda rows: None,
    ) -> None:
        """Take rows into `store`.

        Args:
            on_invalid: a bad row: refuse the file, or skip the row and count it.
            run_id: run that events about skipped rows belong to; rows keep the run that they name.
            dry_run: check every row by itself and store nothing. What depends on other rows (references, keys stored
                with other content) shows only when rows are stored.
            advance: called with the number of rows done.
        """
        self._store = store
        self._on_invalid: OnInvalid = on_invalid
        self._run_id = run_id
        self._dry_run = dry_run
        self._advance = advance
        self.receipt = ImportReceipt()

    def take_files(self, files: Sequence[SourceFile], *, root: Path) -> ImportReceipt:
        """Import files, in this order.

        Args:
            root: folder below which `media/` has the bytes of attachments.
        Raises:
            ExchangeError: rows are bad; the first are listed with their places.
            UsageError: a table cannot be imported by itself.
            StoreError: the store cannot be written.
        """
        for file in files:
            if file.table in NOT_ALONE:
                raise UsageError(
                    f"{file.path}: table {file.table} cannot be imported alone: {NOT_ALONE[file.table]} only the "
                    "export of a whole store carries; restore one, or choose other tables with --table"
                )
        if self._on_invalid == "refuse":
            for file in files:
                self._refuse_bad(file, root)
        if not self._dry_run or self._on_invalid == "skip":
            for file in files:
                self._take_file(file, root)
        return self.receipt

    def take_rows(self, source: str, digest: str, read: Callable[[], Iterable[Mapping[str, Chunk]]]) -> ImportReceipt:
        """Import rows of several tables that come out of one foreign file, part by part, each part together.

        Args:
            source: name of the file, for messages.
            digest: hash of its content.
            read: gives the rows by table, valid ones and others, from the start whenever it is called.
        Raises:
            ExchangeError: with `refuse`, rows are bad; nothing was stored.
        """
        if self._on_invalid == "refuse":
            refused = [one for part in read() for chunk in part.values() for one in chunk.bad]
            if refused:
                raise _refusal(source, refused)
        bad: list[tuple[str, Bad]] = []
        for part in read():
            for table, chunk in part.items():
                bad += [(table, one) for one in chunk.bad]
            if not self._dry_run:
                tables = {name: chunk.rows for name, chunk in part.items() if chunk.rows.num_rows}
                try:
                    stored = self._store.append_all(tables)
                except KeyConflictError as error:
                    raise ExchangeError(
                        f"{source}: {error}\nrows of another file are stored under the same run: choose another --run"
                    ) from error
                for name in tables:
                    self.receipt.count(self.receipt.added, name, stored.appended[name])
                    self.receipt.count(self.receipt.unchanged, name, stored.unchanged[name])
            else:
                for name, chunk in part.items():
                    self.receipt.count(self.receipt.added, name, chunk.rows.num_rows)
            self._advance(max((chunk.rows.num_rows for chunk in part.values()), default=0))
        for table in dict.fromkeys(table for table, _ in bad):
            self._note_skipped(table, source, digest, [one for name, one in bad if name == table])
        return self.receipt

    def _refuse_bad(self, file: SourceFile, root: Path) -> None:
        """Read a file to its end.

        Raises:
            ExchangeError: rows of it are bad.
        """
        bad: list[Bad] = []
        rows = 0
        for good, found in self._checked(file, root):
            bad += found
            rows += good.rows.num_rows
        if bad:
            raise _refusal(str(file.path), bad)
        if self._dry_run:
            self.receipt.count(self.receipt.added, file.table, rows)

    def _take_file(self, file: SourceFile, root: Path) -> None:
        digest = file.digest()
        cursor = f"import/{file.table}/{digest}"
        done = self._store.cursor(cursor) if not file.spec.key else 0
        bad: list[Bad] = []
        for number, (good, found) in enumerate(self._checked(file, root), start=1):
            bad += found
            rows = good.rows.num_rows
            if number <= done:  # rows without a key are known by their file
                self.receipt.count(self.receipt.unchanged, file.table, rows)
            elif self._dry_run:
                self.receipt.count(self.receipt.added, file.table, rows)
            else:
                cursors = {} if file.spec.key else {cursor: number}
                bad += self._append(file, good, cursors, root)
            self._advance(rows + len(found))
        self._note_skipped(file.table, str(file.path), digest, bad)

    def _checked(self, file: SourceFile, root: Path) -> Iterator[tuple[Chunk, list[Bad]]]:
        """Rows that are right by themselves, and the others."""
        for chunk in file.chunks():
            if file.path.suffix != ".jsonl":  # there every line has columns of its own
                _check_columns(file, chunk)
            good, bad = sound_rows(file.spec, chunk)
            if file.table == "media":
                missing = [
                    Bad(
                        good.place(at),
                        f"media_id={media_id!r}: there is no file {MEDIA_FOLDER}/{media_id[:2]}/{media_id}",
                    )
                    for at, media_id in enumerate(good.rows.column("media_id").to_pylist())
                    if not media_path(root / MEDIA_FOLDER, media_id).is_file()
                ]
                if missing:
                    bad += missing
                    gone = {one.place for one in missing}
                    good = _only(good, [at for at in range(good.rows.num_rows) if good.place(at) not in gone])
            yield good, bad

    def _append(self, file: SourceFile, chunk: Chunk, cursors: Mapping[str, int], root: Path) -> list[Bad]:
        """Store rows; those that do not agree with what is stored are given back.

        Raises:
            ExchangeError: with `refuse`, the first of them; rows before it are stored.
        """
        if file.table == "media":
            return self._append_media(chunk, root)
        try:
            stored = self._store.append_all({file.table: chunk.rows}, cursors=cursors)
        except _REFUSALS as error:
            if chunk.rows.num_rows > 1:  # halved until the row at fault stands alone
                half = chunk.rows.num_rows // 2
                first = self._append(file, _slice(chunk, 0, half), {}, root)
                return first + self._append(file, _slice(chunk, half, None), cursors, root)
            bad = Bad(chunk.place(0), str(error))
            if self._on_invalid == "refuse":
                raise ExchangeError(
                    f"{bad.place}: {bad.message}\nrows before it are stored; mend it and import again, or use "
                    "--on-invalid skip"
                ) from error
            if cursors:
                self._store.append_all({}, cursors=cursors)
            return [bad]
        self.receipt.count(self.receipt.added, file.table, stored.appended[file.table])
        self.receipt.count(self.receipt.unchanged, file.table, stored.unchanged[file.table])
        return []

    def _append_media(self, chunk: Chunk, root: Path) -> list[Bad]:
        bad: list[Bad] = []
        before = self._store.version()
        for at, row in enumerate(chunk.rows.to_pylist()):
            path = media_path(root / MEDIA_FOLDER, row["media_id"])
            try:
                found = self._store.put_media(path, row["media_type"], name=row["name"])
                if found != row["media_id"]:
                    raise SchemaError(f"{path} holds other bytes: they hash to {found}")
            except _REFUSALS as error:
                bad.append(Bad(chunk.place(at), str(error)))
                if self._on_invalid == "refuse":
                    raise ExchangeError(f"{chunk.place(at)}: {error}") from error
                continue
            now = self._store.version()
            self.receipt.count(self.receipt.added if now > before else self.receipt.unchanged, "media", 1)
            before = now
        return bad

    def _note_skipped(self, table: str, source: str, digest: str, bad: Sequence[Bad]) -> None:
        """Count rows that were passed over; in `events` once, however often the file is imported."""
        if not bad:
            return
        self.receipt.count(self.receipt.skipped, table, len(bad))
        self.receipt.reasons += [f"{one.place}: {one.message}" for one in bad[:SHOWN]]
        cursor = f"import/skipped/{table}/{digest}"
        if self._dry_run or self._store.cursor(cursor) == len(bad):
            return
        event = {
            "run_id": self._run_id, "step": None, "kind": "import_skipped", "count": len(bad), "experience_id": None,
            "detail": f"{table} from {Path(source).name}: {bad[0].message}", "recorded_at": datetime.now(UTC),
        }  # fmt: skip
        rows = pa.Table.from_pylist([event], schema=EVENTS.schema)
        self._store.append_all({"events": rows}, cursors={cursor: len(bad)})


def sound_rows(spec: TableSpec, chunk: Chunk) -> tuple[Chunk, list[Bad]]:
    """The rows that fit their table, with its types, and the others with what is wrong."""
    bad = list(chunk.bad)
    try:
        batches = conform(spec, chunk.rows)
    except SchemaError as error:
        if chunk.rows.num_rows < 2:
            return Chunk(spec.schema.empty_table(), chunk.place), [*bad, *_each(chunk, error)]
        good: list[pa.Table] = []
        kept: list[int] = []
        for at in range(chunk.rows.num_rows):  # row by row only now that one is known to be wrong
            try:
                good.append(pa.Table.from_batches(conform(spec, chunk.rows.slice(at, 1)), schema=spec.schema))
                kept.append(at)
            except SchemaError as one:
                bad.append(Bad(chunk.place(at), str(one)))
        rows = pa.concat_tables(good) if good else spec.schema.empty_table()
        return Chunk(rows, lambda at: chunk.place(kept[at])), bad
    return Chunk(pa.Table.from_batches(batches, schema=spec.schema), chunk.place), bad


def _check_columns(file: SourceFile, chunk: Chunk) -> None:
    """Columns are the same for every row of a file, so they are told of once.

    Raises:
        ExchangeError: one is missing or unknown.
    """
    try:
        conform(file.spec, chunk.rows.slice(0, 0))
    except SchemaError as error:
        raise ExchangeError(f"{file.path}: {error}") from error


def _each(chunk: Chunk, error: SchemaError) -> list[Bad]:
    return [Bad(chunk.place(at), str(error)) for at in range(chunk.rows.num_rows)]


def _slice(chunk: Chunk, start: int, count: int | None) -> Chunk:
    return Chunk(chunk.rows.slice(start, count), lambda at: chunk.place(start + at))


def _only(chunk: Chunk, rows: Sequence[int]) -> Chunk:
    return Chunk(chunk.rows.take(pa.array(rows, pa.int64())), lambda at: chunk.place(rows[at]))


def _refusal(source: str, bad: Sequence[Bad]) -> ExchangeError:
    shown = "\n".join(f"  {one.place}: {one.message}" for one in bad[:SHOWN])
    more = f"\n  … and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    count = "1 bad row" if len(bad) == 1 else f"{len(bad)} bad rows"
    return ExchangeError(
        f"{source} has {count}, so nothing of it was stored:\n{shown}{more}\n→ mend them, or use --on-invalid skip"
    )
