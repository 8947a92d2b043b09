"""Tiny random models and batches built from plain lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from trainers.base import BATCH_SCHEMA, TrainBatch

MakeBatch = Callable[..., TrainBatch]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of about 100 000 parameters with grouped heads and tied embeddings, as a folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    """Builds a TrainBatch from rows: (token_ids, loss_mask, logprobs, advantages); None stays null."""

    def make(
        rows: Sequence[tuple[Sequence[int], Sequence[bool], Sequence[float | None] | None, Sequence[float] | None]],
        *,
        step: int = 1,
        model_version: int = 0,
        row_versions: Sequence[int | None] | None = None,
        weights: Sequence[float] | None = None,
    ) -> TrainBatch:
        count = len(rows)
        table: dict[str, Any] = {
            "experience_id": [f"x{index}" for index in range(count)],
            "group_id": ["g"] * count,
            "kind": ["rollout"] * count,
            "token_ids": [list(row[0]) for row in rows],
            "loss_mask": [[bool(flag) for flag in row[1]] for row in rows],
            "logprobs": [None if row[2] is None else list(row[2]) for row in rows],
            "advantages": [None if row[3] is None else list(row[3]) for row in rows],
            "reward": [0.0] * count,
            "weight": [1.0] * count if weights is None else list(weights),
            "model_version": [0] * count if row_versions is None else list(row_versions),
        }
        return TrainBatch(f"b{step}", step, model_version, pa.table(table, schema=BATCH_SCHEMA))

    return make
