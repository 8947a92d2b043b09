"""Rows sampled at a temperature carry log-probs of the scaled distribution, and the trainer works on the same one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_samples import by_hand, distributions, make_trainer, random_rows

from buffer_engine.errors import TrainingError
from explorers.base import GenerationRequest, Sampling
from explorers.models.transformers_model import TransformersConfig, TransformersEngine


def sampled_rows(folder: Path, temperature: float) -> list[Any]:
    """Rows as an explorer with the model of `folder` samples and stores them, advantages 1 and −1 in turn."""
    engine = TransformersEngine(TransformersConfig.model_validate({"path": str(folder), "device": "cpu"}))
    prompt = (5, 9, 12)
    sampling = Sampling.model_validate({"temperature": temperature, "max_tokens": 12})
    rows: list[Any] = []
    for index, made in enumerate(engine.generate([GenerationRequest(prompt, sampling, seed) for seed in range(8)])):
        count = len(made.token_ids)
        rows.append(
            (
                [*prompt, *made.token_ids],
                [False] * 3 + [True] * count,
                [None] * 3 + list(made.logprobs),
                [0.0] * 3 + [(-1.0) ** index] * count,
            )
        )
    return rows


@pytest.mark.parametrize("attention", ["packed", "eager"])
def test_the_ratio_is_one_at_the_samplers_temperature_only(tiny_model: Path, make_batch: Any, attention: str) -> None:
    batch = make_batch(sampled_rows(tiny_model, 0.7))
    same = make_trainer(tiny_model, temperature=0.7, attention=attention).train_step(batch).metrics
    raw = make_trainer(tiny_model, temperature=1.0, attention=attention).train_step(batch).metrics
    assert same["ratio_deviation"] < 1e-5
    assert same["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert raw["ratio_deviation"] > 1e-3
    with pytest.raises(TrainingError, match=r"sampled at the trainer's temperature \(1\)"):
        make_trainer(tiny_model, ratio_gate=1e-3).train_step(batch)


def test_log_probs_reference_and_entropy_are_those_of_the_scaled_logits(tiny_folder: Path, make_batch: Any) -> None:
    from transformers import AutoModelForCausalLM

    rows = random_rows(3, seed=31)
    algorithm = {"type": "grpo", "kl": {"estimator": "k2", "coefficient": 0.1}}
    trainer = make_trainer(
        tiny_folder, temperature=0.25, algorithm=algorithm, entropy=True, gradient_checkpointing=True
    )
    for values in (trainer.log_probs(make_batch(rows)), trainer.reference_log_probs(make_batch(rows))):
        for index, row in enumerate(rows):
            np.testing.assert_allclose(values.values[index].as_py()[1:], by_hand(tiny_folder, row[0], 0.25), atol=1e-5)
    metrics = trainer.train_step(make_batch(rows)).metrics
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-9)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    # Tokens 3 … n − 1 are trained, which rows 2 … n − 2 of the predictions stand before.
    scores = torch.cat([distributions(model, row[0], 0.25)[2:] for row in rows])
    expected = float(-(scores.exp() * scores).sum(-1).mean())
    assert metrics["entropy"] == pytest.approx(expected, abs=1e-5)
    assert expected < math.log(32) - 0.01  # so that the entropy of another temperature would not pass


def test_the_gradient_is_that_of_the_scaled_log_probs(tiny_folder: Path, make_batch: Any) -> None:
    """SGD by hand: AdamW with an epsilon far above the gradient moves weights by −gradient · (rate / epsilon)."""
    from transformers import AutoModelForCausalLM

    ids = [5, 9, 12, 7]
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    scores = (model(torch.tensor([ids])).logits[0, :-1] / 0.5).log_softmax(-1)
    (-scores.gather(-1, torch.tensor(ids[1:])[:, None]).mean()).backward()
    own: Any = model.model.norm.weight
    optimizer = {"learning_rate": 1e3, "epsilon": 1e4, "max_grad_norm": None}
    trainer = make_trainer(tiny_folder, temperature=0.5, algorithm={"type": "sft"}, optimizer=optimizer)
    trainer.train_step(make_batch([(ids, [0, 1, 1, 1], None, None)]))
    tensors: Any = trainer.weights(1).tensors
    change = (tensors["model.norm.weight"] - own.detach()) * -10.0
    torch.testing.assert_close(change, own.grad, atol=2e-6, rtol=1e-3)


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        make_trainer(Path("nowhere"), temperature=0.0)
