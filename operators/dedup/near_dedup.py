"""near_dedup: rows whose text is almost another row's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import polars as pl
from pydantic import Field

from buffer_engine.extras import require
from operators.base import Context, Contract, Operator, Result
from operators.dedup.keeping import KeepingConfig
from operators.dedup.preference import by_preference, scopes_of
from operators.ngrams import gram, words_of
from operators.verdicts import verdicts_of

_WORD = r"[\p{L}\p{N}]+"
_SEED = 42


class NearDedupConfig(KeepingConfig):
    """How alike is too alike, and which row stays."""

    column: str = Field("response", description="text column")
    threshold: float = Field(0.8, gt=0, le=1, description="Jaccard similarity of the sets of shingles from which on")
    shingle: int = Field(5, ge=1, description="words in a shingle; a shorter text is one shingle")
    num_perm: int = Field(128, ge=16, le=1024, description="permutations of a MinHash signature; more find more")


class NearDedup(Operator[NearDedupConfig]):
    """Rejects rows that are near-duplicates of a row that stays (`near_duplicate`, with that row as reference).

    Words are runs of letters and digits without case; a text is the set of its runs of `shingle` words. MinHash with
    locality-sensitive hashing proposes rows, and the exact Jaccard similarity decides, so no pair below the threshold
    is ever rejected; a few above it are not proposed (1 in 20 at the threshold, fewer the more alike). Rows are
    looked at in order of preference and compared with rows that stay only, so a chain of small changes keeps more than
    one row. The reference is the most similar row. Rows that earlier passes kept win over new ones. Null and texts
    without a word are like nothing.
    """

    Config = NearDedupConfig
    requires = (("rensa", "dedup"),)

    def __init__(self, config: NearDedupConfig) -> None:
        super().__init__(config)
        self._past = _Index(config.threshold, config.num_perm)

    def contract(self) -> Contract:
        """Reads what is compared and what decides who stays; needs the whole frame; rejects."""
        extra = () if self.config.by is None else (self.config.by,)
        reads = frozenset((self.config.column, *self.config.scope, *extra, "sample_index"))
        return Contract(reads=reads, scope="frame", drops=True, cost="python")

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Compare every row with those that stay."""
        if not frame.height:
            return Result()
        past = self._history(context)
        fresh = _Index(self.config.threshold, self.config.num_perm)
        shingles, scopes = self._shingles(frame), scopes_of(frame, self.config.scope)
        ids = frame["experience_id"]
        found: dict[int, tuple[float, str]] = {}
        # A Python loop: whether a row stays depends on the rows before it.
        for row in by_preference(frame, self.config.by):
            if not shingles[row]:
                continue
            matches = [match for index in (past, fresh) for match in index.similar(scopes[row], shingles[row])]
            if matches:
                found[row] = min(matches, key=lambda match: (-match[0], match[1]))
            else:
                fresh.add(ids[row], scopes[row], shingles[row])
        rows = frame.select(
            pl.Series("ref", [found[row][1] if row in found else None for row in range(frame.height)], pl.String),
            pl.Series("like", [found[row][0] if row in found else None for row in range(frame.height)], pl.Float64),
        )
        reason = pl.when(pl.col("ref").is_not_null()).then(pl.lit("near_duplicate"))
        detail = pl.format("similarity {}", pl.col("like").round(4))
        return Result(verdicts=verdicts_of(rows, "reject", reason, detail=detail, ref_id=pl.col("ref")))

    def _shingles(self, frame: pl.DataFrame) -> list[frozenset[str]]:
        """The set of shingles of every row."""
        words = words_of(frame[self.config.column].cast(pl.String), _WORD, lower=True)
        runs = words.select("row", run=gram(self.config.shingle)).filter(pl.col("run").is_not_null())
        short = (
            words.filter(pl.len().over("row") < self.config.shingle)
            .group_by("row", maintain_order=True)
            .agg(pl.col("word").str.join(" ").alias("run"))
        )
        sets: list[frozenset[str]] = [frozenset()] * frame.height
        for row, found in pl.concat([runs, short]).group_by("row").agg("run").iter_rows():
            sets[row] = frozenset(found)
        return sets

    def _history(self, context: Context) -> _Index:
        """The index of what earlier passes kept; it grows from pass to pass, and what is in it is not done again."""
        if not self.config.history:
            return _Index(self.config.threshold, self.config.num_perm)
        columns = list(dict.fromkeys((self.config.column, *self.config.scope)))
        past = context.history(columns).sort("experience_id")
        if not self._past.ids <= set(past["experience_id"]):
            self._past = _Index(self.config.threshold, self.config.num_perm)  # another run, or a row was taken back
        new = past.filter(~pl.col("experience_id").is_in(list(self._past.ids)))
        if new.height:
            for name, scope, shingles in zip(
                new["experience_id"], scopes_of(new, self.config.scope), self._shingles(new), strict=True
            ):
                self._past.add(name, scope, shingles)
        return self._past


@dataclass(slots=True)
class _Index:
    """Rows that stay, found by similarity within their scope."""

    threshold: float
    num_perm: int
    ids: set[str] = field(default_factory=set)
    _rows: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    _lsh: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def add(self, name: str, scope: tuple[Any, ...], shingles: frozenset[str]) -> None:
        """Put a row in; one without shingles is like nothing and only its id is kept."""
        self.ids.add(name)
        if not shingles:
            return
        if scope not in self._lsh:
            bands = _bands(self.threshold, self.num_perm)
            self._lsh[scope] = require("rensa", "dedup").RMinHashLSH(
                threshold=self.threshold, num_perm=self.num_perm, num_bands=bands
            )
        self._lsh[scope].insert(len(self._rows), self._signature(shingles))
        self._rows.append((name, shingles))

    def similar(self, scope: tuple[Any, ...], shingles: frozenset[str]) -> list[tuple[float, str]]:
        """(similarity, id) of rows of the scope at or above the threshold."""
        if scope not in self._lsh:
            return []
        found: list[tuple[float, str]] = []
        for key in self._lsh[scope].query(self._signature(shingles)):
            name, other = self._rows[key]
            similarity = len(shingles & other) / len(shingles | other)
            if similarity >= self.threshold:
                found.append((similarity, name))
        return found

    def _signature(self, shingles: frozenset[str]) -> Any:
        minhash = require("rensa", "dedup").RMinHash(num_perm=self.num_perm, seed=_SEED)
        minhash.update(sorted(shingles))
        return minhash


def _bands(threshold: float, num_perm: int) -> int:
    """The fewest bands with which a pair at the threshold is proposed with a chance of 95 % at least.

    With b bands of r = num_perm / b rows, a pair of similarity s is proposed with the chance 1 - (1 - s^r)^b.
    """
    fitting = [bands for bands in range(1, num_perm + 1) if num_perm % bands == 0]
    enough = [bands for bands in fitting if 1 - (1 - threshold ** (num_perm // bands)) ** bands >= 0.95]
    return min(enough, default=num_perm)
