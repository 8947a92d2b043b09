"""Which frames compaction merges into which new files.

Cold is what training will not ask for soon: of the rollouts, frames in which no row waits (rejected, failed, trained
often enough, evaluation); of the other tables, all frames but the newest. What stays is read from mapped Arrow streams
without decoding anything. Small files of earlier compactions join when there are several of about the same size, so
that a table has few files and a row is rewritten few times.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from buffer_engine.store.connection import Connection
from buffer_engine.store.frames import Frame, frames_of

FILE_BYTES = 256 << 20
"""Arrow bytes of a new file, about; a larger frame gets a file of its own."""
FILE_FRAMES = 8192
"""Frames of a new file: the catalog is held for about 2 µs for each."""
NEWEST_FRAMES = 64
"""Frames of a table other than rollouts that stay as they were appended, where not everything is asked for."""
FEWEST_FRAMES = 64
FEWEST_BYTES = 4 << 20
"""A new file is worth making for this many frames or bytes."""
_FAN = 4
"""So many files of about the same size become one, so that a row is rewritten a few times only."""
_LEAST_BYTES = 256 << 10
_PACKED = 2
"""Arrow bytes that a byte of Parquet is taken for."""

UNORDERED = ("rollouts", "tasks")
"""Tables of which any frames may be merged; those of other tables are merged with their neighbours only."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """A frame that was appended, or a file of an earlier compaction.

    Attributes:
        bytes: as Arrow.
        kind: `new` is to be merged, `small` may join, `fixed` stays and nothing is merged across it.
    """

    frames: tuple[Frame, ...]
    bytes: int
    kind: str


def plan(
    connection: Connection, table: str, *, everything: bool, max_uses: int, passed_over: Collection[int] = ()
) -> list[list[Frame]]:
    """The frames of each file to be made, in order of commit.

    Args:
        everything: merge waiting and newest frames too, however few.
        max_uses: a kept rollout trained fewer times than this still waits.
        passed_over: ids of frames that cannot be read.
    """
    left_out = {row[0] for row in connection.execute("SELECT frame_id FROM quarantine").fetchall()} | set(passed_over)
    frames = list(frames_of(connection, table))
    if not everything:
        newest = {frame.frame_id for frame in frames[-NEWEST_FRAMES:]}
        left_out |= _waiting(connection, max_uses) if table == "rollouts" else newest
    units = _units(frames, left_out, sizes_of(connection, table))
    files: list[list[Frame]] = []
    for stretch in [units] if table in UNORDERED else _stretches(units):
        chosen = (_any if table in UNORDERED else _neighbours)(stretch, 1 if everything else _FAN - 1)
        fresh = [unit for unit in chosen if unit.kind == "new"]
        if fresh and (everything or len(fresh) >= FEWEST_FRAMES or sum(unit.bytes for unit in fresh) >= FEWEST_BYTES):
            merged = sorted((frame for unit in chosen for frame in unit.frames), key=lambda frame: frame.frame_id)
            weight = {frame.frame_id: unit.bytes // len(unit.frames) for unit in chosen for frame in unit.frames}
            files += cut(merged, weight)
    return files


def _waiting(connection: Connection, max_uses: int) -> set[int]:
    """Frames with a rollout that training may still ask for."""
    found = connection.execute(
        "SELECT DISTINCT frame_id FROM index_rollouts WHERE partition = 'train' AND failed = 0 AND ("
        "status IN ('new', 'held') OR reserved_by IS NOT NULL OR (status = 'kept' AND uses < ?))",
        (max_uses,),
    )
    return {row[0] for row in found.fetchall()}


def sizes_of(connection: Connection, table: str) -> dict[str, int]:
    """Bytes of the table's Parquet files."""
    found = connection.execute(
        "SELECT s.name, s.head + (SELECT coalesce(sum(c.length), 0) FROM chunks c WHERE c.segment_id = s.segment_id) "
        "FROM segments s WHERE s.tbl = ? AND s.format = 'parquet'",
        (table,),
    )
    return dict(found.fetchall())


def _units(frames: Sequence[Frame], left_out: Collection[int], sizes: dict[str, int]) -> list[_Unit]:
    packed: dict[str, list[Frame]] = {}
    for frame in frames:
        if frame.format == "parquet":
            packed.setdefault(frame.segment, []).append(frame)
    units: list[_Unit] = []
    for frame in frames:
        inside = packed.get(frame.segment)
        if inside is None:
            kind = "fixed" if frame.frame_id in left_out else "new"
            units.append(_Unit((frame,), frame.length, kind))
        elif inside[0] is frame:
            size = sizes[frame.segment] * _PACKED
            fixed = size >= FILE_BYTES // 2 or any(one.frame_id in left_out for one in inside)
            units.append(_Unit(tuple(inside), size, "fixed" if fixed else "small"))
    return units


def _stretches(units: Iterable[_Unit]) -> Iterator[list[_Unit]]:
    stretch: list[_Unit] = []
    for unit in units:
        if unit.kind == "fixed":
            yield stretch
            stretch = []
        else:
            stretch.append(unit)
    yield stretch


def _any(units: Sequence[_Unit], fewest: int) -> list[_Unit]:
    chosen = [unit for unit in units if unit.kind == "new"]
    small = sorted((unit for unit in units if unit.kind == "small"), key=lambda unit: unit.bytes)
    return [*chosen, *_joining(small, sum(unit.bytes for unit in chosen), fewest)]


def _neighbours(stretch: Sequence[_Unit], fewest: int) -> list[_Unit]:
    """From the first new frame to the last, with the files before that join them."""
    places = [at for at, unit in enumerate(stretch) if unit.kind == "new"]
    if not places:
        return []
    new = stretch[places[0] : places[-1] + 1]
    before = stretch[: places[0]][::-1]
    return [*_joining(before, sum(unit.bytes for unit in new), fewest), *new]


def _joining(files: Sequence[_Unit], weight: int, fewest: int) -> list[_Unit]:
    """The first of these files, as far as `fewest` at a time are no larger, by level, than what they join."""
    joined = 0
    while True:
        level = _level(weight)
        end = joined
        while end < len(files) and _level(files[end].bytes) <= level:
            end += 1
        if end - joined < fewest:
            return list(files[:joined])
        weight += sum(unit.bytes for unit in files[joined:end])
        joined = end


def _level(size: int) -> int:
    return max(0, int(math.log(max(size, 1) / _LEAST_BYTES, _FAN)))


def cut(frames: Sequence[Frame], weight: dict[int, int]) -> Iterator[list[Frame]]:
    """The frames of each new file; `weight` gives the Arrow bytes of a frame by its id."""
    part: list[Frame] = []
    total = 0
    for frame in frames:
        if part and (total + weight[frame.frame_id] > FILE_BYTES or len(part) >= FILE_FRAMES):
            yield part
            part, total = [], 0
        part.append(frame)
        total += weight[frame.frame_id]
    if part:
        yield part
