"""Trainers on small models, rows of random tokens, and the same numbers from transformers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainers.torch_config import TorchTrainerConfig
from trainers.torch_trainer import TorchTrainer


def make_trainer(folder: Path, *, seed: int = 3, **fields: Any) -> TorchTrainer:
    """A float32 trainer without a gate; `fields` go over that."""
    base: dict[str, Any] = {"type": "torch", "model": "policy", "precision": "float32", "ratio_gate": None}
    base["optimizer"] = {"learning_rate": 1e-3, "max_grad_norm": None}
    return TorchTrainer(TorchTrainerConfig.model_validate({**base, **fields}), folder, seed=seed)


def random_rows(count: int, *, seed: int = 0, low: int = 4, high: int = 30) -> list[Any]:
    """Rows for `make_batch` of low … high − 1 tokens: 3 of prompt, the others sampled at about −3.5 nats."""
    rng = np.random.default_rng(seed)
    rows: list[Any] = []
    for _ in range(count):
        length, prompt = int(rng.integers(low, high)), 3
        sampled = length - prompt
        rows.append(
            (
                rng.integers(3, 32, length).tolist(),
                [False] * prompt + [True] * sampled,
                [None] * prompt + (-3.0 - rng.random(sampled)).tolist(),
                [0.0] * prompt + [float(rng.normal())] * sampled,
            )
        )
    return rows


def bytes_of(trainer: TorchTrainer) -> dict[str, bytes]:
    """The published weights, byte for byte."""
    tensors: Any = trainer.weights(0).tensors
    return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}


def distributions(model: Any, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """What `model` predicts for tokens 1 … n − 1 of one row: log-probs [n − 1, V] at `temperature`."""
    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0, :-1] / temperature).log_softmax(-1)


def by_hand(folder: Path, ids: list[int], temperature: float = 1.0) -> np.ndarray[Any, Any]:
    """Log-probs of tokens 1 … n − 1 from transformers alone, one row at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return chosen(distributions(model, ids, temperature), ids)


def chosen(logprobs: torch.Tensor, ids: list[int]) -> np.ndarray[Any, Any]:
    """Of each row of `distributions`, the log-prob of the token that stands there."""
    return logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
