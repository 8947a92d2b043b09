"""Rollouts as heavy as real ones, made in columns: about 1,000 tokens and 13.8 KB a row."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

from buffer_engine.schema import ROLLOUTS

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from store_rows import rollout

GROUP = 8
LONGEST = 3738
_TEXT = "the quick brown fox jumps over the lazy dog; " * 200


def heavy_rollouts(first: int, count: int, *, seed: int = 0) -> pa.Table:
    """Rollouts number `first` and following, in groups of eight; lengths are log-normal, 64 to 3,738 tokens."""
    random = np.random.default_rng((seed, first))
    lengths = np.clip(random.lognormal(np.log(850), 0.55, count).astype(np.int64), 64, LONGEST)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    total = int(bounds[-1])
    offsets = pa.array(bounds.astype(np.int32))
    within = np.arange(total) - np.repeat(bounds[:-1], lengths)
    sampled = within >= np.repeat(np.minimum(lengths // 3, 200), lengths)
    tokens = {
        "token_ids": pa.array(random.integers(0, 150_000, total).astype(np.int32)),
        "loss_mask": pa.array(sampled),
        "logprobs": pa.array(random.normal(-1, 1, total).astype(np.float32), mask=~sampled),
    }
    texts = [_TEXT[: int(size)] for size in random.integers(2000, 7000, count)]
    own = {
        "experience_id": [
            f"run/t{n // GROUP}/g{n // GROUP}/{n % GROUP}/0-{n:08d}" for n in range(first, first + count)
        ],
        "task_id": [f"t{n // GROUP}" for n in range(first, first + count)],
        "group_id": [f"g{n // GROUP}" for n in range(first, first + count)],
        "group_size": [GROUP] * count,
        "sample_index": [n % GROUP for n in range(first, first + count)],
        "messages": [[{"role": "user", "content": text}] for text in texts],
    }
    base = rollout(0)
    columns = [
        pa.ListArray.from_arrays(offsets, tokens[field.name])
        if field.name in tokens
        else pa.array(own.get(field.name, [base[field.name]] * count), field.type)
        for field in ROLLOUTS.schema
    ]
    return pa.Table.from_arrays(
        [column.cast(field.type) for column, field in zip(columns, ROLLOUTS.schema, strict=True)],
        schema=ROLLOUTS.schema,
    )
