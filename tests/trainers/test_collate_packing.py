"""From Arrow rows to packed micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_engine.errors import RowTooLongError, SchemaError
from trainers.algorithms.base import Needs
from trainers.base import TrainBatch
from trainers.collate import BatchArrays, collate
from trainers.packing import pack


def rows_of(make_batch: Any, lengths: list[int]) -> pa.Table:
    batch: TrainBatch = make_batch(
        [
            (
                [10 * r + t for t in range(n)],
                [t > 0 for t in range(n)],
                [-0.5 - t for t in range(n)],
                [float(r)] * n,
            )
            for r, n in enumerate(lengths)
        ]
    )
    return batch.rows


def test_rows_become_flat_arrays(make_batch: Any) -> None:
    table = make_batch(
        [([5, 6, 7], [0, 1, 1], [None, -1.0, -2.0], [0, 0.5, 0.5]), ([8, 9], [1, 1], None, None)],
        row_versions=[3, None],
    ).rows
    arrays = collate(table)
    assert arrays.offsets.tolist() == [0, 3, 5]
    assert arrays.token_ids.tolist() == [5, 6, 7, 8, 9]
    # nothing predicts the first token of a row, so its mask does not count
    assert arrays.trained.tolist() == [False, True, True, False, True]
    assert np.isnan(arrays.logprobs).tolist() == [True, False, False, True, True]
    assert np.isnan(arrays.advantages).tolist() == [False, False, False, True, True]
    assert arrays.trained_tokens.tolist() == [2, 1]
    assert arrays.model_versions.tolist() == [3, -1]


def test_slices_and_chunks_give_the_same_arrays(make_batch: Any) -> None:
    table = rows_of(make_batch, [2, 5, 1, 3, 4])
    whole = collate(table)
    chunked = collate(pa.concat_tables([table.slice(0, 2), table.slice(2, 2), table.slice(4, 1)]))
    assert chunked.token_ids.tolist() == whole.token_ids.tolist()
    assert chunked.logprobs.tolist() == whole.logprobs.tolist()
    part = collate(table.slice(1, 3))
    assert part.offsets.tolist() == [0, 5, 6, 9]
    assert part.token_ids.tolist() == whole.token_ids[2:11].tolist()
    assert part.advantages.tolist() == whole.advantages[2:11].tolist()


def test_rows_that_cannot_train_are_refused_with_row_and_column(make_batch: Any) -> None:
    needs = Needs(logprobs=True, advantages=True)
    short = make_batch([([1, 2], [0, 1], [-1.0, -1.0], [0, 1]), ([1, 2, 3], [0, 1], None, None)])
    with pytest.raises(SchemaError, match=r"row 'x1' has 2 values in 'loss_mask' and 3 in 'token_ids'"):
        collate(short.rows)
    unsampled = make_batch([([1, 2, 3], [0, 1, 1], [None, -1.0, None], [0, 1, 1])])
    with pytest.raises(SchemaError, match=r"row 'x0' has no finite 'logprobs' at trained token 2"):
        collate(unsampled.rows, needs)
    scoreless = make_batch([([1, 2], [0, 1], [None, -1.0], None)])
    with pytest.raises(SchemaError, match=r"row 'x0' has no finite 'advantages'"):
        collate(scoreless.rows, needs)
    holed = make_batch([([1, None, 3], [0, 1, 1], None, None)])
    with pytest.raises(SchemaError, match=r"'token_ids' has 1 null elements"):
        collate(holed.rows)
    with pytest.raises(SchemaError, match="'token_ids' is missing"):
        collate(short.rows.drop_columns("token_ids"))
    with pytest.raises(SchemaError, match="it has no rows"):
        collate(short.rows.slice(0, 0))


def test_packing_is_first_fit_with_the_longest_first(make_batch: Any) -> None:
    batches = pack(collate(rows_of(make_batch, [3, 6, 2, 5, 4])), token_budget=10)
    assert [batch.rows.tolist() for batch in batches] == [[1, 4], [3, 0, 2]]
    first = batches[0]
    assert first.token_ids.tolist() == [10, 11, 12, 13, 14, 15, 40, 41, 42, 43]
    assert first.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert first.cu_seqlens.tolist() == [0, 6, 10]
    assert first.trained.tolist() == [1, 2, 3, 4, 5, 7, 8, 9]
    assert first.trained_rows.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]


def test_padded_packing_counts_the_longest_row_for_all(make_batch: Any) -> None:
    batches = pack(collate(rows_of(make_batch, [3, 6, 2, 5, 4])), token_budget=12, padded=True)
    assert [batch.rows.tolist() for batch in batches] == [[1, 3], [4, 0, 2]]


def test_a_row_longer_than_the_budget_is_an_error_with_its_name(make_batch: Any) -> None:
    with pytest.raises(RowTooLongError, match=r"row 'x1' has 9 tokens and token_budget is 8"):
        pack(collate(rows_of(make_batch, [3, 9])), token_budget=8)


def group_rows(make_batch: Any) -> pa.Table:
    """Three rows with the prompt 1 2 3, one with 1 2 4."""
    rows = [([1, 2, 3], [7, 8]), ([1, 2, 4], [9]), ([1, 2, 3], [5]), ([1, 2, 3], [6, 6, 6])]
    made: list[Any] = []
    for prompt, reply in rows:
        ids = prompt + reply
        mask = [False] * len(prompt) + [True] * len(reply)
        made.append((ids, mask, [-1.0] * len(ids), [1.0] * len(ids)))
    batch: TrainBatch = make_batch(made)
    return batch.rows


def test_a_shared_prompt_is_laid_out_once(make_batch: Any) -> None:
    (batch,) = pack(collate(group_rows(make_batch)), token_budget=13, share_prompts=True)
    assert batch.rows.tolist() == [3, 0, 2, 1]
    assert batch.token_ids.tolist() == [1, 2, 3, 6, 6, 6, 7, 8, 5, 1, 2, 4, 9]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 3, 0, 1, 2, 3]
    assert batch.cu_seqlens.tolist() == [0, 3, 6, 8, 9, 13]
    assert batch.prefixes.tolist() == [-1, 0, 0, 0, -1]
    assert batch.trained.tolist() == [3, 4, 5, 6, 7, 8, 12]
    assert batch.predictors.tolist() == [2, 3, 4, 2, 6, 2, 11]  # the prompt's last token predicts three first ones
    assert batch.trained_rows.tolist() == [0, 0, 0, 1, 1, 2, 3]


def test_sharing_counts_the_prompt_once_in_each_micro_batch(make_batch: Any) -> None:
    batches = pack(collate(group_rows(make_batch)), token_budget=8, share_prompts=True)
    assert [batch.token_ids.tolist() for batch in batches] == [[1, 2, 3, 6, 6, 6, 7, 8], [1, 2, 3, 5, 1, 2, 4, 9]]
    assert batches[1].prefixes.tolist() == [-1, 0, -1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(20, 60), st.booleans())
def test_every_token_is_packed_once_within_the_budget(
    make_batch: Any, lengths: list[int], budget: int, padded: bool
) -> None:
    arrays: BatchArrays = collate(rows_of(make_batch, lengths))
    batches = pack(arrays, token_budget=budget, padded=padded)
    assert sorted(row for batch in batches for row in batch.rows.tolist()) == list(range(len(lengths)))
    trained = np.sort(np.concatenate([batch.source for batch in batches]))
    assert trained.tolist() == np.flatnonzero(arrays.trained).tolist()
    for batch in batches:
        slots = int(arrays.lengths[batch.rows].max()) * len(batch.rows) if padded else len(batch.token_ids)
        assert slots <= budget
        assert batch.token_ids[batch.trained].tolist() == arrays.token_ids[batch.source].tolist()
    again = pack(arrays, token_budget=budget, padded=padded)
    assert [batch.rows.tolist() for batch in again] == [batch.rows.tolist() for batch in batches]
