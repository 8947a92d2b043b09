"""What a step records token by token: the values of the forward pass, on the steps that were asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch_samples import by_hand, bytes_of, distributions, make_trainer, random_rows

from trainers.token_stats import TOKEN_STATS_SCHEMA


def recorded(trainer: Any, batch: Any) -> list[dict[str, Any]]:
    table = trainer.train_step(batch).token_stats
    assert isinstance(table, pa.Table)
    assert table.schema.equals(TOKEN_STATS_SCHEMA)
    return table.to_pylist()


def test_log_probs_and_ratios_are_those_of_the_weights_before_the_step(tiny_folder: Path, make_batch: Any) -> None:
    rows = random_rows(5, seed=1)
    found = recorded(make_trainer(tiny_folder, token_stats={"every_steps": 1}, token_budget=64), make_batch(rows))
    assert [row["experience_id"] for row in found] == ["x0", "x1", "x2", "x3", "x4"]
    for (ids, mask, sampled, advantages), row in zip(rows, found, strict=True):
        first = 3
        old = by_hand(tiny_folder, ids)[first - 1 :]
        assert row["trained"] == mask
        assert row["old_logprobs"][:first] == row["ratios"][:first] == row["advantages"][:first] == [None] * first
        np.testing.assert_allclose(row["old_logprobs"][first:], old, atol=1e-5)
        np.testing.assert_allclose(row["ratios"][first:], np.exp(old - np.array(sampled[first:])), rtol=1e-4)
        np.testing.assert_allclose(row["advantages"][first:], advantages[first:], rtol=1e-6)
        assert row["entropies"] is None


def test_entropies_are_recorded_where_the_trainer_computes_them(tiny_folder: Path, make_batch: Any) -> None:
    from transformers import AutoModelForCausalLM

    rows = random_rows(2, seed=6)
    trainer = make_trainer(tiny_folder, token_stats={"every_steps": 1}, entropy=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    for (ids, *_), row in zip(rows, recorded(trainer, make_batch(rows)), strict=True):
        logs = distributions(model, ids)
        np.testing.assert_allclose(row["entropies"][3:], -(logs.exp() * logs).sum(-1)[2:].numpy(), atol=1e-5)


def test_only_every_nth_step_is_recorded_and_recording_changes_no_weight(tiny_folder: Path, make_batch: Any) -> None:
    rows = random_rows(4, seed=2)
    plain, noting = make_trainer(tiny_folder), make_trainer(tiny_folder, token_stats={"every_steps": 2})
    for step in (1, 2, 3, 4):
        assert plain.train_step(make_batch(rows, step=step)).token_stats is None
        report = noting.train_step(make_batch(rows, step=step))
        assert (report.token_stats is not None) == (step in (2, 4))
    assert bytes_of(plain) == bytes_of(noting)


def test_a_row_without_a_gradient_is_part_of_the_loss_and_nothing_of_it_was_computed(
    tiny_folder: Path, make_batch: Any
) -> None:
    rows = [*random_rows(1, seed=3), ([4, 5, 6], [False, True, True], [None, -1.0, -2.0], [0.0, 0.0, 0.0])]
    _, idle = recorded(make_trainer(tiny_folder, token_stats={"every_steps": 1}), make_batch(rows))
    assert idle["trained"] == [False, True, True]
    assert idle["old_logprobs"] is None
    assert idle["ratios"] is None
    assert idle["advantages"] == [None, 0.0, 0.0]


def test_rows_that_no_model_sampled_have_log_probs_and_no_ratios(tiny_folder: Path, make_batch: Any) -> None:
    trainer = make_trainer(tiny_folder, algorithm={"type": "sft"}, token_stats={"every_steps": 1})
    ids = [4, 5, 6, 7]
    [row] = recorded(trainer, make_batch([(ids, [False, True, True, True], None, None)]))
    np.testing.assert_allclose(row["old_logprobs"][1:], by_hand(tiny_folder, ids), atol=1e-5)
    assert row["ratios"] is None
    assert row["advantages"] is None


def test_the_same_step_again_from_the_same_state_records_the_same_bytes(tiny_folder: Path, make_batch: Any) -> None:
    batch = make_batch(random_rows(6, seed=9))
    one, two = (
        make_trainer(tiny_folder, token_stats={"every_steps": 1}, entropy=True).train_step(batch).token_stats
        for _ in range(2)
    )
    assert one is not None
    assert one.equals(two)
