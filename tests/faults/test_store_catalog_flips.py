"""One bit of the catalog flips, anywhere: it is harmless, or opening the store or `verify` notices it."""

from __future__ import annotations

import random
import sqlite3
import warnings
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from store_rows import fill_store

from buffer_engine.errors import BufferEngineError
from buffer_engine.store import open_store
from buffer_engine.store.base import ReadPolicy

FLIPS = 4_000
ONCE = {
    ("cursors", "value"): "a number that only its run could contradict",
    ("cursors", "name"): "a name that only its run knows",
    ("meta", "value"): "a version that moved up: later ones follow from it",
    ("batches", "model_version"): "the weights that a reservation was made for; its manifest has its own",
    ("batches", "expires_at"): "a lease that ends at another time",
    ("batch_history", "held"): "which rows a reservation had that is over",
    ("frames", "version"): "a version between those of the frames beside it",
    ("batch_history", "version"): "a version between those of the turns beside it",
    ("segments", "head_xxh3"): "the checksum of a file in which nothing is listed",
    ("segments", "head"): "the length of the schema of such a file",
    ("segments", "segment_id"): "a number that nothing refers to any more",
    ("batch_history", "entry"): "a number that leaves the order of turns as it is",
    ("batch_history", "reserved_at"): "the time of a turn that is over",
}
"""What the catalog says only once, so that a change of it cannot be seen; everything else must be."""


def content(path: Path) -> dict[tuple[str, str], list[object]]:
    """Every column of every table, apart from what can be derived again."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as connection:
        found: dict[tuple[str, str], list[object]] = {}
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for name in names:
            if name.startswith(("reader_", "sqlite_")):
                continue
            rows = connection.execute(f"SELECT * FROM {name}")
            columns = [column[0] for column in rows.description]
            for column, values in zip(columns, zip(*rows.fetchall(), strict=True), strict=False):
                found[name, column] = list(values)
        return found


@pytest.mark.slow
def test_a_flipped_bit_in_the_catalog_is_harmless_or_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    fill_store(folder)
    with open_store(folder, durability="process") as store:
        held = store.reserve(ReadPolicy.model_validate({"rows": 2}), run_id="run", batch_id="b4", model_version=2)
        assert held is not None
    catalog = folder / "catalog.sqlite"
    sound, before = catalog.read_bytes(), content(catalog)
    dice = random.Random(8)
    told: Counter[str] = Counter()
    unseen: Counter[tuple[str, str]] = Counter()
    for _ in range(FLIPS):
        flipped = bytearray(sound)
        flipped[dice.randrange(len(sound))] ^= 1 << dice.randrange(8)
        catalog.write_bytes(flipped)
        try:
            now = content(catalog)
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            now = {}
        if now == before:
            told["harmless"] += 1
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with open_store(folder, read_only=True) as store:
                    noticed = "verify" if store.verify() else ""
            except BufferEngineError:
                noticed = "open"
        for end in ("-wal", "-shm"):
            catalog.with_name(catalog.name + end).unlink(missing_ok=True)
        told[noticed or "unseen"] += 1
        if not noticed:
            unseen.update(place for place in before if now.get(place) != before[place])
    print(f"\n{dict(told)}, unseen {dict(unseen)}")
    assert set(unseen) <= ONCE.keys(), {place: count for place, count in unseen.items() if place not in ONCE}
    assert told["verify"] >= 100
    assert told["unseen"] <= told["verify"] // 10
