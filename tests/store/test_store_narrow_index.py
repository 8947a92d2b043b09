"""Keys in blocks: what a dictionary of keys would say, however the blocks were merged and whoever wrote them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from backends import examples, open_store, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from store_rows import child_environment, decisions, rollouts, score, table

from buffer_engine.errors import CorruptSegmentError, KeyConflictError, SchemaError
from buffer_engine.schema import SCORES
from buffer_engine.store import LocalStore, keyblocks
from buffer_engine.store.keyblocks import FAN_OUT, KeyBlocks, KeyTakenError, Prints, fingerprints

pytestmark = pytest.mark.usefixtures("backend")

ROWS = 12


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    with open_store(tmp_path / "store", durability="process") as opened:
        opened.append("rollouts", rollouts(range(ROWS)))
        yield opened


def scores(rows: list[tuple[int, str, int]], **changes: Any) -> pa.Table:
    return table(
        "scores", [score(f"x{n}", float(n), name=name, version=version, **changes) for n, name, version in rows]
    )


def levels(store: LocalStore) -> list[tuple[int, int]]:
    query = "SELECT level, rows FROM key_blocks WHERE tbl = 'scores' ORDER BY level, block_id"
    return [(level, rows) for level, rows in rows_of(store.path, query)]


_key = st.tuples(st.integers(0, ROWS - 1), st.sampled_from(["a", "b", "ü"]), st.integers(1, 4))


def test_appends_and_reads_agree_with_a_dictionary() -> None:
    @settings(max_examples=examples(40), deadline=None)
    @given(st.lists(st.lists(_key, min_size=1, max_size=8), max_size=14))
    def holds(appends: list[list[tuple[int, str, int]]]) -> None:
        stored: dict[tuple[str, str, int], int] = {}
        with tempfile.TemporaryDirectory() as folder, open_store(folder, durability="process") as store:
            store.append("rollouts", rollouts(range(ROWS)))
            for rows in appends:
                receipt = store.append("scores", scores(rows))
                new = {(f"x{n}", name, version) for n, name, version in rows} - set(stored)
                assert receipt.appended["scores"] == len(new)
                assert receipt.unchanged["scores"] == len(rows) - len(new)
                stored |= dict.fromkeys(new, 0)
            for n in range(ROWS):
                found = store.narrow("scores", [f"x{n}"])
                keys = list(zip(*(found.column(name).to_pylist() for name in SCORES.key), strict=True))
                assert sorted(keys) == sorted(key for key in stored if key[0] == f"x{n}")
            assert store.verify() == []

    holds()


def test_few_blocks_stay_after_many_appends(store: LocalStore) -> None:
    for version in range(1, 101):
        store.append("scores", scores([(0, "a", version)]))
    found = levels(store)
    assert sum(rows for _, rows in found) == 100
    assert len(found) <= 2 * FAN_OUT * 4  # a few of each of the levels that 100 blocks can reach
    assert all(sum(1 for level, _ in found if level == one) < FAN_OUT for one, _ in found)
    assert store.narrow("scores", ["x0"]).column("version").to_pylist() == list(range(1, 101))
    assert store.append("scores", scores([(0, "a", 1), (0, "a", 50), (0, "a", 100)])).unchanged == {"scores": 3}


def test_scores_come_in_commit_order_also_from_merged_blocks(store: LocalStore) -> None:
    for version in (3, 1, 2, 5, 4):
        store.append("scores", scores([(1, "a", version), (0, "a", version)]))
    rows = store.narrow("scores", ["x0", "x1"])
    assert rows.column("version").to_pylist() == [3, 3, 1, 1, 2, 2, 5, 5, 4, 4]
    assert rows.column("experience_id").to_pylist() == ["x1", "x0"] * 5


def test_a_key_with_other_content_is_a_conflict_wherever_its_block_is(store: LocalStore) -> None:
    for version in range(1, 7):
        store.append("scores", scores([(0, "a", version), (1, "a", version)]))
    for version in range(1, 7):
        with pytest.raises(KeyConflictError, match=rf"experience_id='x1', name='a', version={version} is stored alre"):
            store.append("scores", scores([(2, "a", version), (1, "a", version)], comment="other"))
    assert store.narrow("scores", ["x2"]).num_rows == 0


def test_decisions_of_one_rollout_with_other_operators_are_other_keys(store: LocalStore) -> None:
    store.append("decisions", decisions([0], operator="a"))
    receipt = store.append("decisions", pa.concat_tables([decisions([0], operator="b"), decisions([0], operator="a")]))
    assert (receipt.appended, receipt.unchanged) == ({"decisions": 1}, {"decisions": 1})
    assert store.narrow("decisions", ["x0"]).column("operator").to_pylist() == ["a", "b"]


def test_a_row_committed_after_the_look_is_found_inside_the_transaction(store: LocalStore) -> None:
    blocks, prints = KeyBlocks(), fingerprints([pa.array(["x0"]), pa.array(["a"]), pa.array([1], pa.int32())])
    with store._catalog.transaction("test") as connection:  # pyright: ignore[reportPrivateUsage]
        found, seen = blocks.find(connection, "scores", prints)
        assert found == {}
        blocks.insert(connection, SCORES, prints, 7, looked_in=seen)
        with pytest.raises(KeyTakenError):
            blocks.insert(connection, SCORES, prints, 8, looked_in=seen)


def test_two_rollouts_of_one_hash_are_told_apart_by_their_rows(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyblocks, "_hashed", lambda texts: np.full(len(texts), 5, dtype=np.uint64))  # pyright: ignore
    store.append("scores", scores([(0, "a", 1)]))
    store.append("scores", scores([(1, "a", 2)]))
    assert store.narrow("scores", ["x1"]).column("version").to_pylist() == [2]
    # all 128 bits equal for two keys: refused aloud, and nothing is taken for what it is not
    with pytest.raises(KeyConflictError, match="experience_id is 'x0' there and 'x1' here"):
        store.append("scores", scores([(1, "a", 1)]))


def test_a_damaged_block_is_an_error_that_names_it(store: LocalStore) -> None:
    store.append("scores", scores([(0, "a", 1)]))
    with store._catalog.transaction("damage a block") as connection:  # pyright: ignore[reportPrivateUsage]
        connection.execute("UPDATE key_blocks SET keys = ? WHERE tbl = 'scores'", (bytes(24),))
    store.close()
    with open_store(store.path) as again:
        with pytest.raises(CorruptSegmentError, match="keys of scores has changed"):
            again.narrow("scores", ["x0"])
        with pytest.raises(CorruptSegmentError, match="keys of scores has changed"):
            again.append("scores", scores([(1, "a", 1)]))
        findings = again.verify()
        assert {one.kind for one in findings} == {"catalog"}
        assert [one for one in findings if "keys of scores has changed" in one.message]


def test_an_unknown_rollout_is_named_among_many_known_ones(store: LocalStore) -> None:
    with pytest.raises(SchemaError, match=r"experience_id='x99' is not a stored rollout \(1 such id\(s\)\)"):
        store.append("scores", scores([(n, "a", 1) for n in (*range(ROWS), 99)]))


WRITER = """
import sys
from store_rows import score, table
from buffer_engine.store import open_store
with open_store(sys.argv[1], durability="process") as store:
    new = 0
    for version in range(1, 161):
        rows = [score(f"x{n}", 1.0, version=version) for n in range(int(sys.argv[2]), int(sys.argv[3]))]
        new += store.append("scores", table("scores", rows)).appended["scores"]
    print(new)
"""


def test_processes_that_write_the_same_keys_store_each_once(store: LocalStore) -> None:
    spans = [(0, 8), (4, 12), (0, 12)]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(store.path), str(first), str(end)],
            env=child_environment(), stdout=subprocess.PIPE, text=True,
        )
        for first, end in spans
    ]  # fmt: skip
    counts = [int(child.communicate(timeout=120)[0]) for child in children]
    assert sum(counts) == store.table("scores").num_rows == 160 * ROWS
    assert store.verify() == []


def test_prints_of_equal_keys_are_equal_and_of_others_are_not() -> None:
    columns = [pa.array(["x", "x", "y", "x", "x"]), pa.array(["a", "b", "a", "a", "a"]), pa.array([1, 1, 1, 2, 1])]
    owners, tags = fingerprints(columns)
    keys = list(zip(owners.tolist(), tags.tolist(), strict=True))
    assert keys[0] == keys[4]
    assert len(set(keys)) == 4
    assert keyblocks.repeated([Prints(owners, tags)])
    assert not keyblocks.repeated([Prints(owners[:4], tags[:4])])
