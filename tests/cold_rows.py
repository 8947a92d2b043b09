"""Rollouts that weigh and compress as real ones do, and processes that compact or erase until they are killed.

Token ids follow Zipf's law over a vocabulary of 32,000; texts are the words that these ids stand for, and the words
have the letter frequencies of English; log-probabilities are float32 with all of their digits. What a real model says
repeats itself more, so real text may be smaller and is not likely to be larger.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
from store_rows import rollout, table
from store_workload import die_after

from buffer_engine.store import open_store
from buffer_engine.store.erase import EraseRule

VOCABULARY = 32_000
_LETTERS = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
_SHARES = np.array([
    12.7, 9.1, 8.2, 7.5, 7.0, 6.7, 6.3, 6.1, 6.0, 4.3, 4.0, 2.8, 2.8, 2.4, 2.2, 2.4, 2.0, 1.9, 1.0, 1.5, 2.0, 0.8,
    0.15, 0.1, 0.15, 0.07,
])  # fmt: skip


def realistic(numbers: range, *, tokens: int = 1000, seed: int = 0) -> pa.Table:
    """Rollouts of about `tokens` tokens, two thirds of them sampled."""
    random = np.random.default_rng(seed)
    letters = random.choice(_LETTERS, p=_SHARES / _SHARES.sum(), size=(VOCABULARY, 8))
    lengths = random.integers(2, 9, size=VOCABULARY)
    words = ["".join(row[:length]) for row, length in zip(letters, lengths, strict=True)]
    ranks = 1 / np.arange(1, VOCABULARY + 1)
    shuffled = random.permutation(VOCABULARY)
    rows = []
    for number in numbers:
        count = int(random.integers(tokens * 6 // 10, tokens * 14 // 10))
        ids = shuffled[random.choice(VOCABULARY, p=ranks / ranks.sum(), size=count)].tolist()
        prompt = count // 3
        logprobs = (-random.exponential(0.6, count)).astype(np.float32).tolist()
        said = [" ".join(words[one] for one in part) for part in (ids[:prompt], ids[prompt:])]
        messages = [
            {"role": role, "content": text, "tool_calls": None, "tool_call_id": None, "media": None}
            for role, text in zip(("user", "assistant"), said, strict=True)
        ]
        rows.append(
            rollout(
                number, token_ids=ids, loss_mask=[False] * prompt + [True] * (count - prompt),
                logprobs=[None] * prompt + logprobs[prompt:], messages=messages, prompt_length=prompt,
                token_versions=[{"version": 0, "length": count - prompt}],
            )
        )  # fmt: skip
    return table("rollouts", rows)


def compact_until_killed(folder: str, calls: int) -> None:
    """Compact everything in a store; the process kills itself at its `calls`-th call of a C function."""
    with open_store(Path(folder), durability="process") as store:
        die_after(calls)
        store.compact(everything=True, grace_seconds=0)


def erase_until_killed(folder: str, calls: int) -> None:
    """Erase the rejected rows of a store; see `compact_until_killed`."""
    with open_store(Path(folder), durability="process") as store:
        die_after(calls)
        store.erase(EraseRule(rejected_seconds=1), reason="test", author="test", grace_seconds=0)
