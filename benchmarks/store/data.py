"""Seeded rollouts for the benchmark: about 1,000 tokens a row with log-probabilities, a mask and a transcript.

Every peer gets exactly these rows, so their sizes and times can be set side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa

from buffer_engine.schema import BATCH_ROWS, BATCHES, DECISIONS, ROLLOUTS, SCORES

GROUP = 8
"""Rows of one group, siblings of one task."""

_WHEN = datetime(2026, 1, 1, tzinfo=UTC)
_TEXT = """so the answer is then we take first number add to both sides which gives because let now check that value
equals remaining step carry over multiply divide total apples each box left right wait again therefore result sum of"""
_WORDS = _TEXT.split()


def rollout_rows(count: int, *, seed: int = 0, first: int = 0, tokens: int = 1000) -> pa.Table:
    """`count` rollouts in groups of eight; rows differ with `seed`, keys and groups with `first`.

    Args:
        tokens: mean length; lengths are spread evenly over 0.5 to 1.5 times it.
    """
    random = np.random.default_rng([seed, first])
    lengths = random.integers(tokens // 2, tokens + tokens // 2 + 1, count).astype(np.int32)
    prompts = np.minimum(lengths // 4, 200).astype(np.int32)
    offsets = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    inside = np.arange(offsets[-1], dtype=np.int32) - np.repeat(offsets[:-1], lengths)
    sampled = inside >= np.repeat(prompts, lengths)
    logprobs = -random.exponential(0.4, offsets[-1]).astype(np.float32)
    number = np.arange(first, first + count)
    text = _texts(random, count, tokens)
    at = pa.array(np.full(count, int(_WHEN.timestamp() * 1e6)), pa.int64())
    message = ROLLOUTS.schema.field("messages").type
    sampling = ROLLOUTS.schema.field("sampling").type

    def constant(value: object, kind: pa.DataType) -> pa.Array:
        return pa.repeat(pa.scalar(value, kind), count)

    columns: dict[str, pa.Array] = {
        "experience_id": pa.array([f"x{seed}-{one:09d}" for one in number]),
        "parent_id": pa.nulls(count, pa.string()),
        "made_by": constant("explorer", pa.string()),
        "run_id": constant("bench", pa.string()),
        "task_id": pa.array([f"t{one // GROUP:08d}" for one in number]),
        "group_id": pa.array([f"g{seed}-{one // GROUP:08d}" for one in number]),
        "group_size": constant(GROUP, pa.int32()),
        "attempt": constant(0, pa.int32()),
        "sample_index": pa.array((number % GROUP).astype(np.int32)),
        "turn_index": constant(0, pa.int32()),
        "partition": constant("train", pa.string()),
        "explore_step": pa.array(number // 512),
        "model_version": pa.array(number // 512),
        "token_versions": pa.array(
            [[{"version": int(at) // 512, "length": int(size)}] for at, size in zip(number, lengths, strict=True)],
            ROLLOUTS.schema.field("token_versions").type,
        ),
        "messages": pa.array(
            [
                [{"role": "user", "content": one[:cut]}, {"role": "assistant", "content": one[cut:]}]
                for one, cut in ((one, len(one) // 4) for one in text)
            ],
            message,
        ),
        "token_ids": pa.ListArray.from_arrays(offsets, random.integers(0, 32_000, offsets[-1], dtype=np.int32)),
        "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(sampled)),
        "logprobs": pa.ListArray.from_arrays(offsets, pa.array(logprobs, mask=~sampled)),
        "logprob_kind": constant("temperature", pa.string()),
        "prompt_length": pa.array(prompts),
        "stop_reason": constant("eos", pa.string()),
        "eos_sampled": constant(True, pa.bool_()),
        "truncated": constant(False, pa.bool_()),
        "error": pa.nulls(count, pa.string()),
        "sampling": pa.repeat(
            pa.scalar({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 2048, "seed": 7}, sampling), count
        ),
        "tokenizer_id": constant("bench-tokenizer", pa.string()),
        "template_hash": constant("0123456789abcdef", pa.string()),
        "info_json": pa.array([f'{{"difficulty":{one % 7}}}' for one in number]),
        "created_at": at.cast(ROLLOUTS.schema.field("created_at").type),
    }
    return pa.table([columns[name] for name in ROLLOUTS.schema.names], schema=ROLLOUTS.schema)


def score_rows(experience_ids: list[str], *, version: int = 1, seed: int = 0) -> pa.Table:
    """One late score for each rollout."""
    count = len(experience_ids)
    values = np.random.default_rng([seed, version]).random(count)
    at = pa.array(np.full(count, 1_767_225_600_000_000), pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    columns: dict[str, pa.Array] = {
        "experience_id": pa.array(experience_ids),
        "name": pa.repeat("judge", count),
        "value": pa.array(values),
        "weight": pa.repeat(1.0, count),
        "source": pa.repeat("api", count),
        "author": pa.repeat("bench", count),
        "version": pa.repeat(pa.scalar(version, pa.int32()), count),
        "run_id": pa.repeat("bench", count),
        "scored_at": at,
        "comment": pa.nulls(count, pa.string()),
    }
    return pa.table([columns[name] for name in SCORES.schema.names], schema=SCORES.schema)


def decision_rows(experience_ids: list[str]) -> pa.Table:
    """A verdict `keep` for each rollout."""
    given = {
        "verdict": "keep",
        "operator": "bench",
        "reason": "bench",
        "pass_id": "bench",
        "run_id": "bench",
        "decided_at": _WHEN,
    }
    return pa.Table.from_pylist([{"experience_id": one, **given} for one in experience_ids], DECISIONS.schema)


def manifest_rows(batch_id: str, experience_ids: Sequence[str], *, step: int) -> tuple[pa.Table, pa.Table]:
    """The `batches` row of a batch and its `batch_rows`."""
    batch = {
        "batch_id": batch_id, "run_id": "bench", "step": step, "model_version": 0, "algorithm": "grpo",
        "rows": len(experience_ids), "trained_tokens": 1, "config_hash": "bench", "code_commit": "bench",
        "reader_json": "{}", "rng_json": "{}", "created_at": _WHEN,
    }  # fmt: skip
    given = {"batch_id": batch_id, "group_id": "g", "reward": 1.0, "advantage": 0.5, "weight": 1.0, "kind": "rollout",
             "score_versions_json": "{}"}  # fmt: skip
    rows = [{"position": at, "experience_id": one, **given} for at, one in enumerate(experience_ids)]
    return pa.Table.from_pylist([batch], BATCHES.schema), pa.Table.from_pylist(rows, BATCH_ROWS.schema)


def _texts(random: np.random.Generator, count: int, tokens: int) -> list[str]:
    words = random.integers(0, len(_WORDS), (count, max(tokens * 7 // 10, 8)))
    return [" ".join([_WORDS[one] for one in row]) for row in words]
