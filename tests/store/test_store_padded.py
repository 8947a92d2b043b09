"""Token columns as numpy arrays: what the rows say, padded or packed, with unknown numbers that stay unknown."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from backends import examples, only_local, open_store
from hypothesis import given, settings
from hypothesis import strategies as st
from store_rows import rollout, rollouts, table

from buffer_engine.errors import RowTooLongError, SchemaError, StoreError
from buffer_engine.store import LocalStore
from buffer_engine.store.padded import PadBuffers

pytestmark = pytest.mark.usefixtures("backend")

Tokens = list[tuple[int, bool, float | None]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    with open_store(tmp_path / "store", durability="process") as opened:
        yield opened


def with_tokens(number: int, tokens: Tokens, *, sampled: bool = True) -> dict[str, Any]:
    return rollout(
        number,
        token_ids=[one[0] for one in tokens],
        loss_mask=[one[1] for one in tokens],
        logprobs=[one[2] for one in tokens] if sampled else None,
    )


def test_rows_of_two_lengths_are_padded_with_zero_false_and_nan(store: LocalStore) -> None:
    store.append("rollouts", table("rollouts", [
        with_tokens(0, [(7, False, None), (8, True, -0.5), (9, True, -0.25)]), with_tokens(1, [(5, True, -1.0)]),
    ]))  # fmt: skip
    batch = store.padded(["x1", "x0"])
    assert batch.experience_ids == ("x1", "x0")
    assert batch.lengths.tolist() == [1, 3]
    assert batch.columns["token_ids"].tolist() == [[5, 0, 0], [7, 8, 9]]
    assert batch.columns["token_ids"].dtype == np.int32
    assert batch.columns["loss_mask"].tolist() == [[True, False, False], [False, True, True]]
    assert batch.columns["loss_mask"].dtype == np.bool_
    expected = np.array([[-1.0, np.nan, np.nan], [np.nan, -0.5, -0.25]], dtype=np.float32)
    np.testing.assert_array_equal(batch.columns["logprobs"], expected)
    assert batch.columns["logprobs"].dtype == np.float32
    assert batch.known("logprobs").tolist() == [[True, False, False], [False, True, True]]
    assert batch.known("token_ids").tolist() == [[True, False, False], [True, True, True]]


def test_packed_rows_lie_end_to_end(store: LocalStore) -> None:
    store.append("rollouts", table("rollouts", [
        with_tokens(0, [(7, False, None), (8, True, -0.5)]), with_tokens(1, []), with_tokens(2, [(5, True, -1.0)]),
    ]))  # fmt: skip
    rows = store.packed(["x2", "x1", "x0"])
    assert rows.offsets.tolist() == [0, 1, 1, 3]
    assert rows.lengths.tolist() == [1, 0, 2]
    assert rows.columns["token_ids"].tolist() == [5, 7, 8]
    assert rows.columns["loss_mask"].tolist() == [True, False, True]
    np.testing.assert_array_equal(rows.columns["logprobs"], np.array([-1.0, np.nan, -0.5], dtype=np.float32))


def test_a_row_that_no_model_sampled_has_no_known_log_probability(store: LocalStore) -> None:
    store.append("rollouts", table("rollouts", [
        with_tokens(0, [(7, True, None), (8, True, None)], sampled=False), with_tokens(1, [(5, True, -1.0)]),
    ]))  # fmt: skip
    batch = store.padded(["x0", "x1"], ["logprobs"])
    assert np.isnan(batch.columns["logprobs"][0]).all()
    assert batch.known("logprobs").tolist() == [[False, False], [True, False]]


_tokens = st.lists(
    st.tuples(st.integers(0, 2**31 - 1), st.booleans(), st.none() | st.floats(-50, 0, width=32)), max_size=20
)


def test_padded_and_packed_say_what_the_rows_say() -> None:
    @settings(max_examples=examples(60), deadline=None)
    @given(st.lists(st.tuples(_tokens, st.booleans()), min_size=1, max_size=24), st.data())
    def holds(rows: list[tuple[Tokens, bool]], data: st.DataObject) -> None:
        made = [with_tokens(at, tokens, sampled=sampled) for at, (tokens, sampled) in enumerate(rows)]
        cuts = sorted(data.draw(st.lists(st.integers(0, len(made)), max_size=3)))
        order = data.draw(st.lists(st.integers(0, len(made) - 1), max_size=30))
        ids = [f"x{at}" for at in order]
        with tempfile.TemporaryDirectory() as folder, open_store(folder, durability="process") as store:
            for start, end in zip([0, *cuts], [*cuts, len(made)], strict=True):
                store.append("rollouts", table("rollouts", made[start:end]))
            extra = data.draw(st.integers(0, 3))
            longest = max((len(rows[at][0]) for at in order), default=0)
            batch, packed = store.padded(ids, length=longest + extra), store.packed(ids)
        assert batch.lengths.tolist() == packed.lengths.tolist() == [len(rows[at][0]) for at in order]
        for row, at in enumerate(order):
            tokens, sampled = rows[at]
            gap = longest + extra - len(tokens)
            numbers = [np.nan if one[2] is None or not sampled else one[2] for one in tokens]
            wanted = {
                "token_ids": ([one[0] for one in tokens], 0),
                "loss_mask": ([one[1] for one in tokens], False),
                "logprobs": (numbers, np.nan),
            }
            begin, end = packed.offsets[row : row + 2]
            for name, (values, padding) in wanted.items():
                np.testing.assert_array_equal(
                    batch.columns[name][row], np.array([*values, *[padding] * gap], dtype=batch.columns[name].dtype)
                )
                np.testing.assert_array_equal(
                    packed.columns[name][begin:end], np.array(values, dtype=packed.columns[name].dtype)
                )

    holds()


def test_numbers_hidden_under_a_null_do_not_show(store: LocalStore) -> None:
    rows = rollouts([0, 1])
    hidden = pa.array(
        np.array([9.0, 9.0, -0.5, -0.25] * 2, dtype=np.float32), mask=np.array([1, 1, 0, 0] * 2, dtype=bool)
    )
    column = pa.ListArray.from_arrays(pa.array([0, 4, 8], pa.int32()), hidden)
    at = rows.column_names.index("logprobs")
    store.append("rollouts", rows.set_column(at, rows.schema.field(at), column))
    logprobs = store.padded(["x0", "x1"]).columns["logprobs"]
    np.testing.assert_array_equal(logprobs, np.array([[np.nan, np.nan, -0.5, -0.25]] * 2, dtype=np.float32))


def test_memory_is_used_again_and_leaves_nothing_of_the_batch_before(store: LocalStore) -> None:
    store.append("rollouts", table("rollouts", [
        with_tokens(0, [(1, True, -1.0)] * 6),
        with_tokens(1, [(2, False, None)] * 2),
        with_tokens(2, [(3, True, -2.0)]),
    ]))  # fmt: skip
    out = PadBuffers()
    large = store.padded(["x0", "x1"], out=out)
    small = store.padded(["x1", "x2"], out=out)
    for name, values in small.columns.items():
        assert np.shares_memory(values, large.columns[name])
        assert values.flags.c_contiguous
    assert small.columns["token_ids"].tolist() == [[2, 2], [3, 0]]
    assert small.columns["loss_mask"].tolist() == [[False, False], [True, False]]
    np.testing.assert_array_equal(small.columns["logprobs"], np.array([[np.nan, np.nan], [-2, np.nan]], np.float32))


def test_a_batch_can_be_written_to_without_touching_the_store(store: LocalStore) -> None:
    store.append("rollouts", rollouts([0]))
    store.padded(["x0"]).columns["token_ids"][:] = 99
    assert store.padded(["x0"]).columns["token_ids"].tolist() == [[0, 2, 3, 4]]


def test_a_row_longer_than_the_width_is_an_error_and_not_cut(store: LocalStore) -> None:
    store.append("rollouts", rollouts([0, 1]))
    with pytest.raises(RowTooLongError, match=r"rollout 'x0' has 4 tokens and length is 3; nothing is truncated"):
        store.padded(["x0", "x1"], length=3)


def test_no_rows_make_an_empty_batch(store: LocalStore) -> None:
    batch, packed = store.padded([]), store.packed([])
    assert batch.columns["token_ids"].shape == (0, 0)
    assert store.padded([], length=5).columns["loss_mask"].shape == (0, 5)
    assert packed.offsets.tolist() == [0]


def test_an_unknown_row_and_a_column_without_tokens_are_named(store: LocalStore) -> None:
    store.append("rollouts", rollouts([0]))
    with pytest.raises(StoreError, match="there is no rollout 'x9'"):
        store.padded(["x0", "x9"])
    with pytest.raises(SchemaError, match="'messages' is no column with one element per token"):
        store.padded(["x0"], ["messages"])


@only_local("counts maps of files; small objects are read instead")
def test_rows_moved_into_parquet_read_the_same_and_hold_no_removed_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with open_store(path, durability="process") as writer:  # once it is closed, its file may be removed
        for first in range(0, 40, 5):
            made = [
                with_tokens(
                    n, [(n, n % 2 == 0, None if k < n % 4 else -0.5 * k) for k in range(n % 7)], sampled=n % 5 != 0
                )
                for n in range(first, first + 5)
            ]
            writer.append("rollouts", table("rollouts", made))
    ids = [f"x{n}" for n in (*range(39, -1, -3), *range(40))]
    with open_store(path, durability="process") as store:
        before, packed = store.padded(ids), store.packed(ids)
        assert _mapped(path, ".arrows") == 1
        assert store.compact(everything=True, grace_seconds=0).removed == 1
        for _ in range(2):
            after, packed_after = store.padded(ids), store.packed(ids)
            for name in before.columns:
                np.testing.assert_array_equal(after.columns[name], before.columns[name])
                np.testing.assert_array_equal(packed_after.columns[name], packed.columns[name])
        assert _mapped(path, ".arrows") == 0  # else the disk would keep the room of a file that is gone


def _mapped(path: Path, suffix: str) -> int:
    """Files of the store with this suffix, removed ones included, that the process has mapped."""
    lines = [line.removesuffix(" (deleted)") for line in Path("/proc/self/maps").read_text().splitlines()]
    return len({line.split()[-1] for line in lines if str(path) in line and line.endswith(suffix)})
