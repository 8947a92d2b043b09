"""A store made anew from its segments, when the catalog is lost or damaged.

Every record batch that is found goes through an ordinary append into a new, empty store, in the order of the old
versions where the old catalog still tells them and in the order of the times in the rows where it does not. So keys,
references and verdicts are checked and applied as they were the first time, and what comes out is a store like any
other. What only a catalog knows is taken from what is left of it, else inferred, else reported as lost.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

import pyarrow as pa

from buffer_engine.errors import KeyConflictError, PartitionError, SchemaError, StoreError
from buffer_engine.schema import TABLES
from buffer_engine.store.base import Durability, Finding
from buffer_engine.store.catalog import Catalog
from buffer_engine.store.content import row_hashes
from buffer_engine.store.layout import StoreLayout
from buffer_engine.store.local import LocalStore
from buffer_engine.store.opening import open_store
from buffer_engine.store.past_batches import BatchReport, last_manifests, restore_batches
from buffer_engine.store.salvage import Salvaged, salvage
from buffer_engine.store.segment_scan import DamagedPart, FoundFrame, Listing, scan_segment

_FIRST = ("media", "tasks", "models", "rollouts")
"""What other rows refer to; it goes first when the old order is not known."""
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Recovery(BatchReport):
    """What became of a store.

    Attributes:
        rows: rows of the new store, by table.
        unvouched: rows taken from record batches that nothing of the old catalog vouches for: acknowledged or not, and
            checked for form only.
        lost: what is gone, in words.
        findings: what `verify` says about the new store.
    """

    rows: dict[str, int] = field(default_factory=dict[str, int])
    unvouched: Counter[str] = field(default_factory=Counter[str])
    lost: list[str] = field(default_factory=list[str])
    findings: list[Finding] = field(default_factory=list[Finding])


def recover_store(
    source: str | os.PathLike[str], into: str | os.PathLike[str], *, durability: Durability = "power"
) -> Recovery:
    """Make the store `into` from the segments of `source` and what its catalog still gives; `source` is not changed.

    Nobody may write to `source` meanwhile. Media are linked or copied; checkpoints and other files of runs are not.

    Raises:
        StoreError: `source` has no segments, or `into` exists and is not empty.
    """
    layout = StoreLayout(Path(source))
    if layout.addresses.exists():
        raise StoreError(
            f"{layout.root}: parts of this store lie elsewhere ({layout.addresses.name}), and a store can be recovered "
            "only from a folder that holds all of it; restore the database, or the bucket, from a copy of its own"
        )
    names = layout.segment_files()
    if not names:
        raise StoreError(f"{layout.root}: there are no segments below {layout.segments.name}/ to recover a store from")
    target = Path(into)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise StoreError(f"{target}: the recovered store needs a new or empty folder; name another path")
    old = salvage(layout.catalog)
    report = Recovery()
    listed, whole = _listings(old)
    with open_store(target, durability=durability) as store:
        _link_media(layout.root / "media", target / "media")
        frames = _found(layout, names, listed, report, whole=whole)
        taker = _Taker(store, report)
        for together in _in_order(last_manifests(frames)):
            taker.take(together)
        _move_cursors(store, old, report)
        _close_erased(store, durability)
        restore_batches(store, old, durability, report)
        report.lost += _lost(old, whole=whole)
        report.rows = dict(store.info().rows)
        report.findings = store.verify()
    return report


def _listings(old: Salvaged) -> tuple[dict[str, dict[int, Listing]], bool]:
    """By segment and offset, the batches that the old catalog still lists; and whether that is all it ever listed."""
    names = {row[0]: row[2] for row in old.rows["segments"]}
    listed: dict[str, dict[int, Listing]] = {}
    for row in old.rows["frames"]:
        if not all(isinstance(row[at], int) for at in (0, 2, 3, 4, 5, 6, 7)):
            continue
        frame_id, _, segment_id, offset, length, rows, version, xxh3 = row
        name = names.get(segment_id)
        if isinstance(name, str):
            listing = Listing(frame_id, version, length, rows, xxh3)  # pyright: ignore[reportArgumentType]
            listed.setdefault(name, {})[int(offset)] = listing  # pyright: ignore[reportArgumentType]
    return listed, bool(listed) and not old.problems


def _found(
    layout: StoreLayout, names: Sequence[str], listed: dict[str, dict[int, Listing]], report: Recovery, *, whole: bool
) -> list[FoundFrame]:
    frames: list[FoundFrame] = []
    for name in names:
        for one in scan_segment(layout.segment(name), name, listed.get(name, {})):
            if isinstance(one, DamagedPart):
                # behind the last listed batch of a catalog that is whole, nothing was ever acknowledged
                if not whole or one.offset in listed.get(name, {}):
                    report.left_out.append(f"segments/{one.segment}@{one.offset}: {one.message}")
            elif not whole or _still_listed(one, listed.get(name, {})):
                frames.append(one)
    missing = sorted(set(listed) - set(names))
    report.left_out += [
        f"segments/{name}: the file is missing, with {sum(one.rows for one in listed[name].values())} rows"
        for name in missing
    ]
    return _newest_form(frames)


def _still_listed(one: FoundFrame, listed: dict[int, Listing]) -> bool:
    """Whether the old catalog has this very batch here: it may have been moved on, or never have been acknowledged."""
    known = listed.get(one.offset)
    return one.listing is not None and known is not None and known.frame_id == one.listing.frame_id


def _newest_form(frames: Sequence[FoundFrame]) -> list[FoundFrame]:
    """One form of each batch: compaction leaves the files that it moved rows from for a while.

    The newest Parquet file counts, because an erasure takes payload away by writing one.
    """
    newest: dict[int, int] = {}
    for one in frames:
        if one.compacted:
            newest[one.xxh3] = max(newest.get(one.xxh3, 0), one.file_time)
    return [one for one in frames if one.xxh3 not in newest or (one.compacted and one.file_time == newest[one.xxh3])]


def _in_order(frames: Sequence[FoundFrame]) -> Iterator[list[FoundFrame]]:
    """Record batches to append together: those of one old version, or one by one in the order of their times."""
    vouched = [(one.listing.version, one.listing.frame_id, one) for one in frames if one.listing is not None]
    if len(vouched) == len(frames):
        for _, together in groupby(sorted(vouched, key=lambda known: known[:2]), key=lambda known: known[0]):
            yield [one for _, _, one in together]
    else:
        yield from ([one] for one in sorted(frames, key=_by_time))


def _by_time(one: FoundFrame) -> tuple[int, bool, datetime, int, str, int]:
    phase = _FIRST.index(one.table) if one.table in _FIRST else len(_FIRST)
    # of two rows with one key the vouched one counts; the order of what comes later tells which verdict is the last
    doubtful = one.listing is None and one.table in _FIRST
    version = 1 << 62 if one.listing is None else one.listing.version
    return phase, doubtful, one.newest or _LONG_AGO, version, one.segment, one.offset


class _Taker:
    """Appends what was found, and says what the new store refuses."""

    def __init__(self, store: LocalStore, report: Recovery) -> None:
        self._store = store
        self._report = report
        self._logged: dict[str, set[bytes]] = {}

    def take(self, frames: Sequence[FoundFrame]) -> None:
        """Append record batches: together if the store takes them, else one by one, else row by row."""
        try:
            self._append(frames)
        except (KeyConflictError, SchemaError, PartitionError) as error:
            if len(frames) > 1:
                for one in frames:
                    self.take([one])
            else:
                self._rows_of(frames[0], error)

    def _rows_of(self, frame: FoundFrame, error: StoreError | SchemaError) -> None:
        refused: list[str] = []
        rows = frame.batch.num_rows
        for row in range(rows if rows > 1 else 0):
            try:
                self._store.append(frame.table, pa.Table.from_batches([frame.batch.slice(row, 1)]))
            except (KeyConflictError, SchemaError, PartitionError) as one:
                refused.append(str(one))
        if rows == 1:
            refused.append(str(error))
        where = f"segments/{frame.segment}@{frame.offset}"
        self._report.left_out.append(f"{where}: {len(refused)} of {rows} rows, because: {refused[0]}")

    def _append(self, frames: Sequence[FoundFrame]) -> None:
        tables: dict[str, pa.Table] = {}
        for frame in frames:
            rows = pa.Table.from_batches([frame.batch])
            if not TABLES[frame.table].key:
                rows = self._not_yet_logged(frame, rows)
            tables[frame.table] = pa.concat_tables([tables[frame.table], rows]) if frame.table in tables else rows
        receipt = self._store.append_all({name: rows for name, rows in tables.items() if rows.num_rows})
        for frame in frames:
            if frame.listing is None:
                self._report.unvouched[frame.table] += receipt.appended.get(frame.table, 0)

    def _not_yet_logged(self, frame: FoundFrame, rows: pa.Table) -> pa.Table:
        """Rows without a key, less those that a batch nobody vouches for says once more."""
        seen = self._logged.setdefault(frame.table, set())
        hashes = row_hashes(TABLES[frame.table], frame.batch)
        new = [one not in seen or frame.listing is not None for one in hashes]
        seen.update(hashes)
        return rows.filter(pa.array(new, pa.bool_()))


def _move_cursors(store: LocalStore, old: Salvaged, report: Recovery) -> None:
    cursors = {name: value for name, value in old.rows["cursors"] if isinstance(name, str) and isinstance(value, int)}
    store.append_all({}, cursors=cursors)
    if "cursors" in old.problems:
        report.lost.append(
            f"cursors: {len(cursors)} could be read, perhaps not all ({old.problems['cursors']}); a run goes on from "
            "its cursors, so start it under a new name unless they are all there"
        )


def _close_erased(store: LocalStore, durability: Durability) -> None:
    """Keep every policy from rows whose payload was erased."""
    with closing(Catalog(StoreLayout(store.path), durability=durability, read_only=False)) as catalog:
        with catalog.transaction("close erased rows") as connection:
            connection.execute(
                "UPDATE index_rollouts SET failed = 1 WHERE experience_id IN (SELECT experience_id FROM index_erasures)"
            )


def _lost(old: Salvaged, *, whole: bool) -> list[str]:
    lost = ["versions: they are counted anew, so versions noted elsewhere mean nothing here"]
    lost.append("reservations without a manifest: their rows are free again")
    lost.append("the turns that batches took before their present status, and when")
    lost.append("what lies beside the catalog and the segments (checkpoints, weights, specs): copy it if runs go on")
    if not whole:
        why = old.problems.get("frames") or old.problems.get("segments") or "no entry could be read"
        lost.append(
            f"the list of record batches ({why}): rows that were written and never acknowledged may be among those "
            "taken, and the bytes of what nothing vouches for could be checked for form only"
        )
    return lost


def _link_media(source: Path, target: Path) -> None:
    """Media never change, so the same file serves both; copied where links are not possible."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:
            shutil.copy2(one, other)

    if source.is_dir():
        shutil.copytree(source, target, copy_function=link)
