"""Retention: the payload of rollouts leaves the store by a rule, and a record of it stays.

What goes are the texts, tokens, mask, log-probabilities and `info_json`; identity, group, versions, scores, verdicts
and what was trained stay. The frames that hold the rows are written anew without the payload, and the same transaction
puts them in place and records the erasure: no read ever sees one without the other. An earlier version shows the rows
without payload too. The bytes leave the disk with the old files, when their grace is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.errors import StoreBusyError, StoreError
from buffer_engine.schema import DECISIONS, ERASURES
from buffer_engine.store.append import Appender
from buffer_engine.store.catalog import Catalog
from buffer_engine.store.compact import Compactor, Made, Progress, move
from buffer_engine.store.connection import Connection
from buffer_engine.store.erase_rule import EraseRule, Target, targets
from buffer_engine.store.files import SegmentFiles
from buffer_engine.store.frames import Frame, frames_by_id, frames_of
from buffer_engine.store.layout import SEARCH_INDEX, StoreLayout
from buffer_engine.store.merging import cut
from buffer_engine.store.policies.tables import has
from buffer_engine.store.reading import SegmentReader
from buffer_engine.store.sweep import hold_compaction, remove_unfinished, sweep

PAYLOAD: Mapping[str, object] = {"messages": [], "token_ids": [], "loss_mask": [], "logprobs": [], "info_json": "{}"}
"""Columns that an erasure empties, and what they hold afterwards; log-probabilities that were null stay null."""


@dataclass(frozen=True, slots=True)
class Erasure:
    """What an erasure took, or (a dry run) would take.

    Attributes:
        rows, tokens: rollouts whose payload went, and their tokens.
        bytes: payload of those rows as Arrow.
        by_fate: rows by status: rejected, trained, kept, new, held.
        left: rows that the rule names and that stay, because training wants them.
        files: new files; `retired` and `removed` old ones (see `Compaction`).
        lingering: streams that still hold payload of these rows, because a process appends to them or they also hold
            damaged frames; they go with a later compaction.
    """

    rows: int = 0
    tokens: int = 0
    bytes: int = 0
    by_fate: Mapping[str, int] = field(default_factory=dict)
    left: int = 0
    files: tuple[str, ...] = ()
    retired: int = 0
    removed: int = 0
    lingering: tuple[str, ...] = ()


class Eraser:
    """Erases payload in one store."""

    def __init__(self, layout: StoreLayout, catalog: Catalog, files: SegmentFiles, appender: Appender) -> None:
        self._layout = layout
        self._catalog = catalog
        self._files = files
        self._appender = appender
        self._compactor = Compactor(layout, catalog, files)

    def erase(
        self,
        rule: EraseRule,
        *,
        reason: str,
        author: str,
        dry_run: bool,
        force: bool,
        max_uses: int,
        replays: Mapping[str, int],
        grace_seconds: float,
        progress: Progress | None,
    ) -> Erasure:
        """Take the payload of the rows of a rule away, with a record of it in `erasures`.

        Rows that a batch holds or that training waits for stay, and are counted, unless `force` is given.

        Raises:
            StoreBusyError: another process compacts or erases, or a row was reserved meanwhile; repeat.
            StoreError: a named row is not stored, the reason is empty, the disk is full.
            CorruptSegmentError: a row to be erased lies in a damaged frame.
        """
        if dry_run:
            going, left = self._chosen(rule, force=force, max_uses=max_uses, replays=replays)
            return self._told(going, left)
        if not reason.strip():
            raise StoreError(f"{self._layout.root}: an erasure needs a reason that can be read later; give one")
        with hold_compaction(self._catalog):
            remove_unfinished(self._catalog, self._files)
            going, left = self._chosen(rule, force=force, max_uses=max_uses, replays=replays)
            told = self._told(going, left)
            by_frame: dict[int, list[Target]] = {}
            for target in going:
                by_frame.setdefault(target.frame_id, []).append(target)
            frames, lingering = self._frames(by_frame.keys())
            parts = list(cut(frames, {frame.frame_id: _weight(frame) for frame in frames}))
            made: list[Made] = []
            done = 0
            for part in parts:
                inside = [target for frame in part for target in by_frame.get(frame.frame_id, [])]
                made.append(self._one_file(part, inside, rule, reason=reason, author=author, force=force))
                done += len(part)
                if progress is not None:
                    progress(done, len(frames))
            swept = sweep(self._catalog, self._files, grace_seconds=grace_seconds)
        # The full-text index holds messages: it is derived, and the next search makes it again.
        for end in ("", "-wal", "-shm"):
            (self._layout.root / f"{SEARCH_INDEX}{end}").unlink(missing_ok=True)
        return Erasure(
            told.rows, told.tokens, told.bytes, told.by_fate, told.left, tuple(one.name for one in made),
            swept.retired, swept.removed, lingering,
        )  # fmt: skip

    def _chosen(
        self, rule: EraseRule, *, force: bool, max_uses: int, replays: Mapping[str, int]
    ) -> tuple[list[Target], int]:
        """The rows to erase, and how many the rule names that may not go."""
        reader = SegmentReader(self._layout, self._catalog, self._files)
        with self._catalog.snapshot():
            found = targets(self._catalog.read(), reader, rule, max_uses=max_uses, replays=replays)
        reader.close()
        going = [target for target in found if force or not target.wanted]
        return going, len(found) - len(going)

    def _told(self, going: Sequence[Target], left: int) -> Erasure:
        wanted: dict[int, list[int]] = {}
        for target in going:
            wanted.setdefault(target.frame_id, []).append(target.row)
        reader = SegmentReader(self._layout, self._catalog, self._files)
        tokens = size = 0
        for frame_id, frame in frames_by_id(self._catalog.read(), wanted).items():
            rows = reader.batch(frame, list(PAYLOAD)).take(pa.array(wanted[frame_id], pa.int64()))
            tokens += int(pc.sum(pc.list_value_length(rows.column("token_ids"))).as_py() or 0)
            size += rows.nbytes
        reader.close()
        return Erasure(len(going), tokens, size, Counter(target.fate for target in going), left)

    def _frames(self, wanted: Iterable[int]) -> tuple[list[Frame], tuple[str, ...]]:
        """Frames to be written anew: all of every file that can go, of the others those that hold a row of the rule."""
        frame_ids = set(wanted)
        quarantined = {row[0] for row in self._catalog.read().execute("SELECT frame_id FROM quarantine").fetchall()}
        frames = list(frames_of(self._catalog.read(), "rollouts"))
        by_file: dict[str, list[Frame]] = {}
        for frame in frames:
            by_file.setdefault(frame.segment, []).append(frame)
        chosen: list[Frame] = []
        lingering: list[str] = []
        for name, inside in by_file.items():
            holding = [frame for frame in inside if frame.frame_id in frame_ids]
            if not holding:
                continue
            stays = any(frame.frame_id in quarantined for frame in inside) or (
                inside[0].format == "arrows" and self._files.being_written(name, inside[0].head)
            )
            if stays:
                lingering.append(name)
            chosen += holding if stays else inside
        return sorted(chosen, key=lambda frame: frame.frame_id), tuple(lingering)

    def _one_file(
        self,
        frames: Sequence[Frame],
        going: Sequence[Target],
        rule: EraseRule,
        *,
        reason: str,
        author: str,
        force: bool,
    ) -> Made:
        """Write some frames without the payload of rows, put them in place and record the erasure."""
        rows: dict[int, list[int]] = {}
        tokens: dict[tuple[int, int], int] = {}
        for target in going:
            rows.setdefault(target.frame_id, []).append(target.row)

        def blanked(frame: Frame, batch: pa.RecordBatch) -> pa.RecordBatch:
            places = rows.get(frame.frame_id)
            if places is None:
                return batch
            lengths = pc.list_value_length(batch.column("token_ids"))
            tokens.update({(frame.frame_id, at): lengths[at].as_py() for at in places})
            return without_payload(batch, places)

        made = self._compactor.write(frames, change=blanked)
        moment = datetime.now(UTC)
        records = [
            {
                "experience_id": one.experience_id, "run_id": one.run_id, "rule": rule.text, "reason": reason,
                "author": author, "tokens": tokens[one.frame_id, one.row], "erased_at": moment,
            }
            for one in going
        ]  # fmt: skip
        verdicts = [
            {
                "experience_id": one.experience_id, "verdict": "reject", "operator": "retention", "position": None,
                "reason": "erased", "detail": rule.text, "ref_id": None, "pass_id": f"retention/{moment.isoformat()}",
                "run_id": one.run_id, "decided_at": moment,
            }
            for one in going
            if one.undecided
        ]  # fmt: skip
        tables = {"erasures": pa.Table.from_pylist(records, schema=ERASURES.schema)}
        if verdicts:
            tables["decisions"] = pa.Table.from_pylist(verdicts, schema=DECISIONS.schema)
        self._appender.append_all(tables, inside=_swap([made], going, force=force))
        return made


def without_payload(batch: pa.RecordBatch, rows: Sequence[int]) -> pa.RecordBatch:
    """Rollouts with the payload of these rows emptied."""
    gone = np.zeros(batch.num_rows, dtype=bool)
    gone[list(rows)] = True
    columns: list[pa.Array] = []
    for at, name in enumerate(batch.schema.names):
        column = batch.column(at)
        if name in PAYLOAD:
            empty = pa.array([PAYLOAD[name]], column.type)
            places = np.where(gone, len(column), np.arange(len(column)))
            if column.null_count:
                places = np.where(column.is_null().to_numpy(zero_copy_only=False), np.arange(len(column)), places)
            column = pa.concat_arrays([column, empty]).take(pa.array(places))
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _swap(made: Sequence[Made], going: Sequence[Target], *, force: bool) -> Callable[[Connection], None]:
    def inside(connection: Connection) -> None:
        for one in going:
            reserved_by, status = connection.execute(
                "SELECT reserved_by, status FROM index_rollouts WHERE experience_id = ?", (one.experience_id,)
            ).fetchone()
            # a row that was to be rejected just now reads `rejected` by the verdict of this very transaction
            if not force and (reserved_by is not None or status not in (one.status, "rejected")):
                raise StoreBusyError(
                    f"rollout {one.experience_id!r} was wanted by training meanwhile (status {status}, reserved by "
                    f"{reserved_by}); nothing of its file was erased: repeat"
                )
        connection.executemany(
            "UPDATE index_rollouts SET failed = 1 WHERE experience_id = ?", [(one.experience_id,) for one in going]
        )
        if has(
            connection, "reader_dirty"
        ):  # the groups are fewer rows now for policies that train a row more than once
            connection.executemany(
                "INSERT OR IGNORE INTO reader_dirty SELECT run_id, group_id FROM index_rollouts "
                "WHERE experience_id = ? AND partition = 'train'",
                [(one.experience_id,) for one in going],
            )
        move(connection, made)

    return inside


def _weight(frame: Frame) -> int:
    return frame.length if frame.format == "arrows" else frame.rows * 1024
