"""The rows of one run, made once and written to Arrow files that every peer reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from benchmarks.store import shared
from benchmarks.store.data import rollout_rows, score_rows

BULK = 2048
SMALL = 64
BATCH = 256
WRITERS = 4
FIRST = 8
"""Rows that are stored before the clock runs: files, tables and caches exist from then on."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is done.

    Attributes:
        object_commits: commits of 64 rows that are Python objects.
        repeats: batches that are read; a third as many aggregations.
        writer_commits: commits of 64 rows by each of the four writers.
        watched: appends that a second process looks for.
        budget: seconds after which a loop over commits of one peer is cut.
    """

    bulk_commits: int
    small_commits: int
    object_commits: int
    repeats: int
    scores: int
    writer_commits: int
    watched: int
    budget: float = 60.0

    @classmethod
    def of(cls, rows: int, *, quick: bool) -> Sizes:
        """For `rows` rows in bulk, rounded up to whole commits; `quick` is no basis for numbers to quote."""
        commits = max(1, -(-rows // BULK))
        if quick:
            return cls(commits, 8, 4, 3, min(2000, commits * BULK), 2, 8)
        return cls(commits, 100, 30, 30, min(10_000, commits * BULK), 25, 60)


@dataclass(frozen=True, slots=True)
class DataFiles:
    """Arrow files, by what they are for; ids begin with `x<seed>-`.

    Attributes:
        scores: five versions of one score for the first rows: three are stored beside, two change the reward.
    """

    row_bytes: float
    trainable_tokens: float
    first: str
    bulk: list[str]
    small: list[str]
    objects: list[str]
    scores: list[str]
    writers: list[list[str]]
    watched: list[str]

    @classmethod
    def make(cls, folder: Path, sizes: Sizes) -> DataFiles:
        """Write them all into `folder`."""

        def rollouts(name: str, count: int, rows: int, seed: int) -> list[str]:
            made = (rollout_rows(rows, seed=seed, first=rows * at) for at in range(count))
            return [str(shared.write(folder / f"{name}-{at}.arrow", part)) for at, part in enumerate(made)]

        bulk = rollouts("bulk", sizes.bulk_commits, BULK, 0)
        part = shared.read(Path(bulk[0]))
        ids = [f"x0-{one:09d}" for one in range(sizes.scores)]
        return cls(
            row_bytes=part.nbytes / part.num_rows,
            trainable_tokens=float(pa.compute.sum(part.column("loss_mask").combine_chunks().flatten()).as_py() / BULK),
            first=rollouts("first", 1, FIRST, 99)[0],
            bulk=bulk,
            small=rollouts("small", sizes.small_commits, SMALL, 1),
            objects=rollouts("objects", sizes.object_commits, SMALL, 2),
            scores=[
                str(shared.write(folder / f"scores-{version}.arrow", score_rows(ids, version=version)))
                for version in (1, 2, 3, 4, 5)
            ],
            writers=[
                rollouts(f"writer-{at}", sizes.writer_commits, SMALL, 10 + at) for at in range(WRITERS)
            ],
            watched=rollouts("watched", sizes.watched, 8, 50),
        )  # fmt: skip

    def tokens_of(self, number: int) -> list[int]:
        """Token ids of a row of the bulk commits."""
        part = shared.read(Path(self.bulk[number // BULK]))
        return part.column("token_ids")[number % BULK].as_py()
