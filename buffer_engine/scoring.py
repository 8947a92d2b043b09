"""Late scores: given to stored rows by anyone, at any time, also to rows that were trained on.

A score never overwrites: it continues the versions of its component on its row, and the highest version counts. All
rows of one call are checked first and then appended together, or none is. Only the score log and the row index are
touched, so what a score costs does not depend on how long the scored sequences are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.errors import KeyConflictError, SchemaError, StoreBusyError, UsageError, did_you_mean
from buffer_engine.schema import SCORES
from buffer_engine.store.base import ExperienceStore

ScoreSource = Literal["operator", "workflow", "judge", "human", "import", "api"]
"""Where a score comes from."""

COLUMNS = ("experience_id", "name", "value", "weight", "source", "author", "comment")
"""Columns of a table of late scores; the first and `value` are needed, the others may be given for all rows at once."""

_ATTEMPTS = 20
_SHOWN = 20

_Given = dict[str, Any]
_Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ScoreReceipt:
    """What a call of `add_scores` did, in score rows.

    Attributes:
        version: catalog version at which the scores are visible.
        added: appended.
        unchanged: not appended, because they are the current scores already.
        superseding: of the added ones, those that take the place of an earlier score of the component.
        metrics: of the added ones, those without a weight: they are not part of the reward.
    """

    version: int
    added: int
    unchanged: int
    superseding: int
    metrics: int


def add_scores(
    store: ExperienceStore,
    scores: pa.Table,
    *,
    name: str | None = None,
    author: str | None = None,
    weight: float | None = None,
    source: ScoreSource = "human",
    places: Sequence[str] | None = None,
) -> ScoreReceipt:
    """Append scores to stored rows.

    The same table again changes nothing: a component's scores are appended to a row only where its newest ones differ
    in value, weight, source, author or comment. A component that the row has already keeps its weight unless one is
    given; a new one without a weight is a metric, not part of the reward.

    Args:
        scores: one row per score: experience_id and value (null: looked at and could not be scored), and optionally
            name, weight, source, author and comment. Several rows about one component of a row become versions in
            this order.
        name, author, weight, source: for rows that do not say it themselves.
        places: where each row stands (`line 7 of FILE`), for messages; default: `row 6`, counted from 0.

    Raises:
        SchemaError: columns, values or ids are wrong; names all of them. Nothing was written.
        StoreError: the store cannot be written.
    """
    where = [f"row {number}" for number in range(scores.num_rows)] if places is None else list(places)
    given = _checked(scores, where, name=name, author=author, weight=weight, source=source)
    runs = store.runs_of([row["experience_id"] for row in given])
    unknown = [
        f"{place}: no rollout {row['experience_id']!r} in the store"
        for place, row in zip(where, given, strict=True)
        if row["experience_id"] not in runs
    ]
    _refuse(unknown, scores.num_rows)
    for _ in range(_ATTEMPTS):
        rows, superseding = _new_versions(store, given, runs)
        if not rows:
            return ScoreReceipt(store.version(), 0, len(given), 0, 0)
        try:
            receipt = store.append("scores", pa.Table.from_pylist(rows, schema=SCORES.schema))
        except KeyConflictError:
            continue  # somebody scored one of the rows in the meantime: continue after their version
        metrics = sum(1 for row in rows if row["weight"] is None)
        return ScoreReceipt(receipt.version, len(rows), len(given) - len(rows), superseding, metrics)
    raise StoreBusyError(f"{store.path}: others scored some of these rows {_ATTEMPTS} times in between; try again")


def _checked(
    scores: pa.Table, where: Sequence[str], *, name: str | None, author: str | None, weight: float | None, source: str
) -> list[_Given]:
    """The rows with defaults filled in; every problem of every row is reported at once."""
    for column in scores.column_names:
        if column not in COLUMNS:
            raise SchemaError(f"scores: unknown column {column!r}: {did_you_mean(column, COLUMNS)}")
    for column, default in (("experience_id", None), ("value", None), ("name", name), ("author", author)):
        if column not in scores.column_names and default is None:
            instead = f", and no {column} is given for all rows" if column in ("name", "author") else ""
            raise SchemaError(f"scores: there is no column {column}{instead}")
    if weight is not None and not math.isfinite(weight):
        raise UsageError(f"weight {weight} is not a finite number")
    defaults = {"name": name, "author": author, "weight": weight, "source": source, "comment": None}
    rows: list[_Given] = []
    problems: list[str] = []
    # A loop over rows: each is told apart in the message about it.
    for place, written in zip(where, scores.to_pylist(), strict=True):
        row = defaults | {key: value for key, value in written.items() if value is not None}
        row.setdefault("value", None)
        row.setdefault("experience_id", None)
        problems += [f"{place}: {problem}" for problem in _problems(row)]
        rows.append(row)
    _refuse(problems, scores.num_rows)
    return rows


def _problems(row: _Given) -> list[str]:
    found: list[str] = []
    for column in ("experience_id", "name", "author"):
        if not isinstance(row[column], str) or not row[column]:
            found.append(
                f"{column} is {'missing' if row[column] in (None, '') else repr(row[column])}; it must be text"
            )
    for column in ("value", "weight"):
        value = row[column]
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            found.append(f"{column} is {value!r}; it must be a number or null")
        elif not math.isfinite(value):
            found.append(f"{column} is {value}; it must be finite, and null where there is none")
    if row["source"] not in get_args(ScoreSource):
        found.append(f"source is {row['source']!r}: {did_you_mean(str(row['source']), get_args(ScoreSource))}")
    if row["comment"] is not None and not isinstance(row["comment"], str):
        found.append(f"comment is {row['comment']!r}; it must be text")
    return found


def _refuse(problems: Sequence[str], rows: int) -> None:
    if not problems:
        return
    shown = "\n  ".join(problems[:_SHOWN])
    more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    raise SchemaError(f"{len(problems)} problems in {rows} scores, so none was written:\n  {shown}{more}")


def _new_versions(store: ExperienceStore, given: Sequence[_Given], runs: Mapping[str, str]) -> tuple[list[_Given], int]:
    """Rows to append with their versions, and how many of them supersede an earlier score."""
    wanted: dict[_Key, list[_Given]] = {}
    for row in given:
        wanted.setdefault((row["experience_id"], row["name"]), []).append(row)
    most = max((len(rows) for rows in wanted.values()), default=1)
    stored: dict[_Key, list[_Given]] = {}
    for score in _newest(store, wanted, most).to_pylist():
        stored.setdefault((score["experience_id"], score["name"]), []).append(score)
    moment = datetime.now(UTC)
    rows: list[_Given] = []
    superseding = 0
    for key, fresh in wanted.items():
        before = sorted(stored.get(key, []), key=lambda score: score["version"])
        if before:
            fresh = [row if row["weight"] is not None else row | {"weight": before[-1]["weight"]} for row in fresh]
        newest = before[-len(fresh) :]
        if [_content(score) for score in newest] == [_content(row) for row in fresh]:
            continue
        version = before[-1]["version"] if before else 0
        superseding += len(fresh) if before else len(fresh) - 1
        for number, row in enumerate(fresh, start=version + 1):
            rows.append({**row, "version": number, "run_id": runs[key[0]], "scored_at": moment})
    return rows, superseding


def _newest(store: ExperienceStore, wanted: Mapping[_Key, object], most: int) -> pa.Table:
    """The last `most` versions of each component wanted, so that a long history is not turned into Python objects."""
    scores = store.narrow("scores", sorted({experience_id for experience_id, _ in wanted}))
    names = pa.array(sorted({name for _, name in wanted}), pa.string())
    scores = scores.filter(pc.is_in(scores.column("name"), value_set=names)).select([*COLUMNS, "version"])
    key = ["experience_id", "name"]
    last = scores.group_by(key).aggregate([("version", "max")])
    scores = scores.join(last, key)
    floor = pc.subtract(scores.column("version_max"), pa.scalar(most, pa.int32()))
    return scores.filter(pc.greater(scores.column("version"), floor))


def _content(score: _Given) -> tuple[Any, ...]:
    value, weight = score["value"], score["weight"]
    return (
        None if value is None else float(value),
        None if weight is None else float(weight),
        score["source"],
        score["author"],
        score["comment"],
    )
