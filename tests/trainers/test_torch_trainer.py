"""The torch trainer on a tiny random Llama: what a step computes, skips and refuses."""

from __future__ import annotations

import dataclasses
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_samples import by_hand, bytes_of, make_trainer, random_rows

from buffer_engine.errors import ModelError, NonFiniteLossError, RowTooLongError, SchemaError, TrainingError
from trainers.base import TrainBatch
from trainers.torch_config import TorchTrainerConfig
from trainers.torch_optimizer import learning_rate
from trainers.torch_trainer import TorchTrainer


def copy_of(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    tensors: Any = trainer.weights(0).tensors
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


# ---- the forward pass


@pytest.mark.parametrize("attention", ["packed", "eager"])
def test_packed_log_probs_equal_one_row_at_a_time(tiny_folder: Path, make_batch: Any, attention: str) -> None:
    rows = random_rows(14, seed=1, low=4, high=40) + random_rows(3, seed=2, low=200, high=260)
    trainer = make_trainer(tiny_folder, attention=attention, token_budget=512, logit_chunk=100)
    values = trainer.log_probs(make_batch(rows)).values
    assert values.type == pa.list_(pa.float32())
    for index in (0, 5, 13, 14, 16):
        got = values[index].as_py()
        assert got[0] is None
        np.testing.assert_allclose(got[1:], by_hand(tiny_folder, rows[index][0]), atol=1e-5)


def test_a_row_does_not_see_its_neighbours(tiny_folder: Path, make_batch: Any) -> None:
    trainer = make_trainer(tiny_folder)
    rows = random_rows(3, seed=4)
    other = [rows[0], ([9] * 12, *random_rows(1, low=12, high=13)[0][1:]), rows[2]]
    first, second = trainer.log_probs(make_batch(rows)).values, trainer.log_probs(make_batch(other)).values
    for index in (0, 2):
        np.testing.assert_allclose(first[index].as_py()[1:], second[index].as_py()[1:], atol=1e-6)


def test_a_one_token_row_has_one_null(tiny_folder: Path, make_batch: Any) -> None:
    batch = make_batch([([5], [False], None, None), ([5, 6], [0, 1], None, None)])
    values = make_trainer(tiny_folder).log_probs(batch).values.to_pylist()
    assert values[0] == [None]
    assert len(values[1]) == 2


# ---- the step


def gradient_of(trainer: TorchTrainer, batch: TrainBatch, rate: float) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss, and the step's change of weights (AdamW's first step depends on the gradient alone)."""
    before = copy_of(trainer)
    loss = trainer.train_step(batch).metrics["loss"]
    after = copy_of(trainer)
    return loss, {name: (after[name] - before[name]) / rate for name in after}


AGGREGATIONS: list[dict[str, Any]] = [
    {"aggregate": "token_mean"},
    {"aggregate": "seq_mean_token_mean"},
    {"aggregate": "seq_mean_token_sum_norm", "loss_norm": 20.0},
]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(30, 400), st.sampled_from(AGGREGATIONS), st.sampled_from(["packed", "eager"]))
def test_any_token_budget_gives_the_same_loss_and_gradient(
    tiny_folder: Path, make_batch: Any, budget: int, fields: dict[str, Any], attention: str
) -> None:
    batch = make_batch(random_rows(10, seed=7))
    algorithm = {"type": "grpo", **fields}
    # A large epsilon makes AdamW's first step close to proportional to the gradient, so small differences show.
    optimizer = {"learning_rate": 1.0, "epsilon": 1e3, "max_grad_norm": None}
    results = [
        gradient_of(
            make_trainer(tiny_folder, algorithm=algorithm, optimizer=optimizer, token_budget=b, attention=a), batch, 1.0
        )
        for b, a in ((4096, "packed"), (budget, attention))
    ]
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    for name, change in results[0][1].items():
        torch.testing.assert_close(change, results[1][1][name], atol=2e-7, rtol=1e-3)


def group_rows(seed: int, prompts: tuple[int, ...], replies: tuple[int, ...]) -> list[Any]:
    """Rows in groups that share a prompt: prompt lengths, and the lengths of each group's replies."""
    rng = np.random.default_rng(seed)
    rows: list[Any] = []
    for prompt in prompts:
        start = rng.integers(3, 32, prompt).tolist()
        for reply in replies:
            logprobs = [None] * prompt + (-3.0 - rng.random(reply)).tolist()
            advantages = [0.0] * prompt + [float(rng.normal())] * reply
            ids = start + rng.integers(3, 32, reply).tolist()
            rows.append((ids, [False] * prompt + [True] * reply, logprobs, advantages))
    return rows


@pytest.mark.parametrize(
    ("prompts", "replies"),
    [((1, 12, 30), (3, 9, 1, 5)), ((150, 220), (4, 60, 17))],
    ids=["short rows", "rows for the fused kernel"],
)
def test_computing_a_shared_prompt_once_changes_no_number(
    tiny_folder: Path, make_batch: Any, prompts: tuple[int, ...], replies: tuple[int, ...]
) -> None:
    batch = make_batch(group_rows(21, prompts, replies))
    optimizer = {"learning_rate": 1.0, "epsilon": 1e3, "max_grad_norm": None}
    apart = make_trainer(tiny_folder, optimizer=optimizer, share_prompts=False)
    shared = make_trainer(tiny_folder, optimizer=optimizer, share_prompts=True)
    first, first_change = gradient_of(apart, batch, 1.0)
    second, second_change = gradient_of(shared, batch, 1.0)
    assert first == pytest.approx(second, abs=1e-6)
    for name, change in first_change.items():
        torch.testing.assert_close(change, second_change[name], atol=2e-7, rtol=1e-3)


def test_a_token_of_a_shared_prompt_feels_every_row_that_continues_it(tiny_folder: Path, make_batch: Any) -> None:
    # Prompt 5 9; replies 12 and 7. The gradient of −ℓ of both is the sum of the gradients of each alone.
    rows = [([5, 9, 12], [0, 0, 1], None, None), ([5, 9, 7], [0, 0, 1], None, None)]
    optimizer = {"learning_rate": 1.0, "epsilon": 1e6, "max_grad_norm": None}
    fields: dict[str, Any] = {"algorithm": {"type": "sft", "aggregate": "seq_mean_token_sum"}, "optimizer": optimizer}
    norms: list[Any] = []
    for chosen in ([rows[0]], [rows[1]], rows):
        trainer = make_trainer(tiny_folder, **fields)
        norms.append(gradient_of(trainer, make_batch(chosen), 1.0)[1]["model.embed_tokens.weight"] * len(chosen))
    torch.testing.assert_close(norms[0] + norms[1], norms[2], atol=5e-9, rtol=2e-2)


def test_a_model_that_mixes_packed_rows_is_refused(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainers import torch_model

    read = torch_model._read  # pyright: ignore[reportPrivateUsage]

    def leaking(*arguments: Any, **options: Any) -> Any:
        model = read(*arguments, **options)
        norm = model.model.layers[0].input_layernorm
        forward = norm.forward
        # A short convolution over the sequence, as recurrent and hybrid models have.
        norm.forward = lambda states: forward(states + torch.roll(states, 1, dims=1))
        return model

    monkeypatch.setattr(torch_model, "_read", leaking)
    with pytest.raises(ModelError, match="mixes rows that are packed"):
        make_trainer(tiny_folder)


def test_rows_with_zero_advantage_are_skipped_without_changing_loss_or_weights(
    tiny_folder: Path, make_batch: Any
) -> None:
    rows = random_rows(8, seed=9)
    for index in (1, 4, 5):
        rows[index] = (*rows[index][:3], [0.0] * len(rows[index][0]))
    nearly = list(rows)
    for index in (1, 4, 5):
        nearly[index] = (*rows[index][:3], [1e-30] * len(rows[index][0]))
    skipping, computing = make_trainer(tiny_folder), make_trainer(tiny_folder)
    skipped, computed = skipping.train_step(make_batch(rows)), computing.train_step(make_batch(nearly))
    assert (skipped.metrics["skipped_rows"], computed.metrics["skipped_rows"]) == (3.0, 0.0)
    assert skipped.metrics["trained_tokens"] == computed.metrics["trained_tokens"]
    assert skipped.metrics["loss"] == pytest.approx(computed.metrics["loss"], abs=1e-6)
    assert skipped.metrics["grad_norm"] == pytest.approx(computed.metrics["grad_norm"], rel=1e-4)


def test_a_batch_of_zero_advantages_still_takes_its_optimizer_step(tiny_folder: Path, make_batch: Any) -> None:
    # Momentum of the step before moves the weights, exactly as it would with a computed gradient of 0.
    rows = random_rows(4, seed=10)
    flat = [(*row[:3], [0.0] * len(row[0])) for row in rows]
    trainer = make_trainer(tiny_folder)
    trainer.train_step(make_batch(rows))
    before = bytes_of(trainer)
    report = trainer.train_step(make_batch(flat, step=2))
    assert report.metrics["loss"] == 0.0
    assert report.metrics["grad_norm"] == 0.0
    assert "ratio_deviation" not in report.metrics
    assert bytes_of(trainer) != before


def test_masked_tokens_and_their_numbers_do_not_matter(tiny_folder: Path, make_batch: Any) -> None:
    rows = random_rows(4, seed=11)
    strange = [
        (ids, mask, [value if on else -77.0 for on, value in zip(mask, logprobs, strict=True)],
         [value if on else 1e6 for on, value in zip(mask, advantages, strict=True)])
        for ids, mask, logprobs, advantages in rows
    ]  # fmt: skip
    first, second = make_trainer(tiny_folder), make_trainer(tiny_folder)
    first.train_step(make_batch(rows))
    second.train_step(make_batch(strange))
    assert bytes_of(first) == bytes_of(second)


def test_loss_and_metrics_of_a_step_by_hand(tiny_folder: Path, make_batch: Any) -> None:
    ids = [5, 9, 12, 7]
    current = by_hand(tiny_folder, ids)  # tokens 1, 2, 3; tokens 2 and 3 are trained, sampled with d = .3 and −.1
    behaviour = [None, None, float(current[1]) - 0.3, float(current[2]) + 0.1]
    batch = make_batch([(ids, [0, 0, 1, 1], behaviour, [0, 0, 2.0, 2.0])])
    metrics = make_trainer(tiny_folder).train_step(batch).metrics
    ratios = [math.exp(0.3), math.exp(-0.1)]
    assert metrics["loss"] == pytest.approx(-2.0 * (1.2 + ratios[1]) / 2, abs=1e-5)
    assert metrics["clip_fraction"] == 0.5
    assert metrics["ratio_mean"] == pytest.approx(sum(ratios) / 2, abs=1e-5)
    assert metrics["ratio_deviation"] == pytest.approx((ratios[0] - 1 + 1 - ratios[1]) / 2, abs=1e-5)
    assert metrics["approx_kl"] == pytest.approx((ratios[0] - 1 - 0.3 + ratios[1] - 1 + 0.1) / 2, abs=1e-5)
    assert metrics["trained_tokens"] == 2.0
    assert all(math.isfinite(value) for value in metrics.values())


def test_recomputed_old_log_probs_make_every_ratio_one(tiny_folder: Path, make_batch: Any) -> None:
    batch = make_batch(random_rows(4, seed=12))
    metrics = make_trainer(tiny_folder, recompute_old_logprobs=True).train_step(batch).metrics
    assert metrics["clip_fraction"] == 0.0
    advantages = [value for row in random_rows(4, seed=12) for value in row[3][3:]]
    assert metrics["loss"] == pytest.approx(-np.mean(advantages), abs=1e-6)
    assert metrics["ratio_deviation"] > 0.01  # the sampler's stored values are still what is reported


def test_gradient_checkpointing_changes_no_number(tiny_folder: Path, make_batch: Any) -> None:
    batch = make_batch(random_rows(6, seed=13))
    plain = make_trainer(tiny_folder, logit_chunk=16, entropy=True)
    saving = make_trainer(tiny_folder, logit_chunk=16, entropy=True, gradient_checkpointing=True)
    first, second = plain.train_step(batch).metrics, saving.train_step(batch).metrics
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-6)
    assert 0.0 < first["entropy"] <= math.log(32) + 1e-6
    assert first["entropy"] == pytest.approx(second["entropy"], rel=1e-6)


def test_bfloat16_arithmetic_keeps_float32_weights_and_stays_near(tiny_folder: Path, make_batch: Any) -> None:
    batch = make_batch(random_rows(6, seed=14))
    exact, rough = make_trainer(tiny_folder), make_trainer(tiny_folder, precision="bfloat16")
    first, second = exact.train_step(batch).metrics, rough.train_step(batch).metrics
    assert first["loss"] == pytest.approx(second["loss"], abs=0.02)
    assert first["grad_norm"] != second["grad_norm"]
    assert {tensor.dtype for tensor in copy_of(rough).values()} == {torch.float32}


def test_sft_needs_neither_log_probs_nor_advantages(tiny_folder: Path, make_batch: Any) -> None:
    ids = [5, 9, 12, 7]
    batch = make_batch([(ids, [0, 1, 1, 1], None, None)])
    trainer = make_trainer(tiny_folder, algorithm={"type": "sft"})
    assert trainer.train_step(batch).metrics["loss"] == pytest.approx(-by_hand(tiny_folder, ids).mean(), abs=1e-5)


# ---- reference and KL


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 64}])
def test_the_reference_stays_at_the_start(tiny_folder: Path, make_batch: Any, lora: Any) -> None:
    kl = {"estimator": "k2", "coefficient": 0.5}
    trainer = make_trainer(tiny_folder, algorithm={"type": "grpo", "kl": kl}, lora=lora)
    batch = make_batch(random_rows(4, seed=15))
    reports = [trainer.train_step(dataclasses.replace(batch, step=step)).metrics for step in (1, 2, 3)]
    assert reports[0]["kl"] == pytest.approx(0.0, abs=1e-9)
    assert reports[2]["kl"] > 1e-6
    np.testing.assert_allclose(
        trainer.reference_log_probs(batch).values[0].as_py()[1:],
        by_hand(tiny_folder, random_rows(4, seed=15)[0][0]),
        atol=1e-5,
    )


def test_a_kl_penalty_in_the_reward_must_be_taken_off_before_the_step(tiny_folder: Path, make_batch: Any) -> None:
    kl = {"estimator": "k1", "coefficient": 0.1, "place": "reward"}
    trainer = make_trainer(tiny_folder, algorithm={"type": "grpo", "kl": kl})
    rows = random_rows(3, seed=16)
    batch = make_batch(rows)
    with pytest.raises(TrainingError, match="kl_penalties was not called"):
        trainer.train_step(batch)
    penalties = trainer.kl_penalties(batch).to_pylist()
    expected = 0.1 * (np.array(rows[1][2][3:]) - by_hand(tiny_folder, rows[1][0])[2:]).sum()
    assert penalties[1] == pytest.approx(expected, abs=1e-5)
    trainer.train_step(batch)


# ---- refusals leave the weights alone


def test_a_loss_that_is_not_finite_leaves_everything_unchanged(tiny_folder: Path, make_batch: Any) -> None:
    trainer = make_trainer(tiny_folder, algorithm={"type": "grpo", "dual_clip": None})
    rows = random_rows(3, seed=17)
    good = make_batch(rows)
    broken = make_batch([*rows[:2], (rows[2][0], rows[2][1], rows[2][2], [1e300] * len(rows[2][0]))])
    before = bytes_of(trainer)
    with pytest.raises(NonFiniteLossError, match=r"batch b1: the loss is -?inf .*weights are unchanged"):
        trainer.train_step(broken)
    assert bytes_of(trainer) == before
    untouched = make_trainer(tiny_folder, algorithm={"type": "grpo", "dual_clip": None})
    trainer.train_step(good)
    untouched.train_step(good)
    assert bytes_of(trainer) == bytes_of(untouched)


def test_a_finite_loss_with_an_infinite_gradient_is_refused_too(tiny_folder: Path, make_batch: Any) -> None:
    # The two rows' losses cancel; each one's gradient is beyond float32 once the norm squares it.
    trainer = make_trainer(tiny_folder)
    ids = [5, 9, 12, 7]
    current = [None, *by_hand(tiny_folder, ids).tolist()]
    batch = make_batch([(ids, [0, 0, 1, 1], current, [0, 0, 3e38, -3e38])])
    before = bytes_of(trainer)
    with pytest.raises(NonFiniteLossError, match="weights are unchanged"):
        trainer.train_step(batch)
    assert bytes_of(trainer) == before


def test_the_first_on_policy_step_must_agree_with_the_sampler(tiny_folder: Path, make_batch: Any) -> None:
    rows = random_rows(3, seed=18)
    trainer = make_trainer(tiny_folder, ratio_gate=0.05)
    before = bytes_of(trainer)
    with pytest.raises(TrainingError, match=r"mean \|ratio − 1\| is .* above ratio_gate 0.05.*Check that"):
        trainer.train_step(make_batch(rows))
    assert bytes_of(trainer) == before
    # Rows of older weights are expected to differ: they neither pass nor fail the gate.
    trainer.train_step(make_batch(rows, model_version=2, row_versions=[1, 1, 1]))
    values = trainer.log_probs(make_batch(rows)).values.to_pylist()
    exact = [(row[0], row[1], own, row[3]) for row, own in zip(rows, values, strict=True)]
    report = trainer.train_step(make_batch(exact))
    assert report.metrics["ratio_deviation"] < 1e-4
    trainer.train_step(make_batch(rows))  # the gate was for the first such step


def test_rows_too_long_and_batches_without_a_trained_token_are_refused(tiny_folder: Path, make_batch: Any) -> None:
    trainer = make_trainer(tiny_folder, token_budget=1024)
    long = random_rows(1, low=600, high=601)
    with pytest.raises(RowTooLongError, match=r"row 'x0' has 600 tokens and the model's context is 512"):
        trainer.train_step(make_batch(long))
    flat = [(*long[0][:3], [0.0] * 600)]
    with pytest.raises(RowTooLongError, match="token_budget is 64"):
        make_trainer(tiny_folder, token_budget=64).train_step(make_batch([*random_rows(1), *flat]))
    with pytest.raises(TrainingError, match="no token to train"):
        trainer.train_step(make_batch([([1, 2], [0, 0], [None, None], [0, 0])]))
    with pytest.raises(SchemaError, match="row 'x0' has no finite 'logprobs'"):
        trainer.train_step(make_batch([([1, 2], [0, 1], None, [0, 1])]))


@pytest.mark.parametrize("bad", [32, -1])
def test_ids_of_another_vocabulary_are_refused_by_name(tiny_folder: Path, make_batch: Any, bad: int) -> None:
    trainer = make_trainer(tiny_folder)
    batch = make_batch([*random_rows(1), ([5, bad, 7], [0, 1, 1], [None, -1.0, -1.0], [0, 1, 1])])
    said = rf"row 'x1' has id {bad} at token 1 and the model's vocabulary is 32"
    for call in (trainer.train_step, trainer.log_probs):
        with pytest.raises(SchemaError, match=said):
            call(batch)


def test_a_rows_weight_scales_its_gradient_and_no_denominator(tiny_folder: Path, make_batch: Any) -> None:
    # Two rows of −ℓ with weights 3 and 0: (3·Σ of the first) / all four tokens; the second row is not even computed.
    ids = [5, 9, 12]
    batch = make_batch([(ids, [0, 1, 1], None, None), ([8, 4, 6], [0, 1, 1], None, None)], weights=[3.0, 0.0])
    metrics = make_trainer(tiny_folder, algorithm={"type": "sft"}).train_step(batch).metrics
    assert metrics["loss"] == pytest.approx(-3.0 * by_hand(tiny_folder, ids).sum() / 4, abs=1e-5)
    assert (metrics["trained_tokens"], metrics["skipped_rows"]) == (4.0, 1.0)


def test_model_folders_that_cannot_be_trained_are_named(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        make_trainer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config.json \(it holds: nothing\)"):
        make_trainer(tmp_path / "empty")
    shutil.copytree(tiny_folder, tmp_path / "weightless")
    (tmp_path / "weightless" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        make_trainer(tmp_path / "weightless")
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_folder, tmp_path / "partial")
    tensors = load_file(tiny_folder / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "partial" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"incomplete: 1 tensors are missing .*layers.1.mlp.up_proj"):
        make_trainer(tmp_path / "partial")


def test_a_model_that_changes_its_logits_afterwards_is_refused(tmp_path: Path) -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, logits_scaling=8.0,
    )  # fmt: skip
    GraniteForCausalLM(config).save_pretrained(tmp_path / "granite")
    with pytest.raises(ModelError, match="changes its logits"):
        make_trainer(tmp_path / "granite")


# ---- settings


def test_learning_rate_rises_and_falls() -> None:
    config = TorchTrainerConfig.model_validate(
        {
            "type": "torch", "model": "p",
            "optimizer": {"learning_rate": 1.0, "warmup_steps": 4, "schedule": "linear", "total_steps": 8},
        }
    ).optimizer  # fmt: skip
    assert [learning_rate(config, step) for step in range(1, 10)] == [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25, 0]
    cosine = config.model_copy(update={"schedule": "cosine"})
    assert learning_rate(cosine, 7) == pytest.approx(0.5)
    assert learning_rate(config.model_copy(update={"schedule": "constant"}), 99) == 1.0


def test_reading_a_configuration_imports_no_torch() -> None:
    code = (
        "import sys; from trainers.registry import TRAINERS, ALGORITHMS\n"
        "config = TRAINERS.load('torch').Config.model_validate({'type': 'torch', 'model': 'p', 'lora': {},"
        " 'algorithm': {'type': 'grpo', 'advantage': {'type': 'rloo'}}})\n"
        "assert config.algorithm.needs_groups and ALGORITHMS.load('sft').Config().needs_reward is False\n"
        "print([name for name in ('torch', 'transformers', 'peft', 'safetensors') if name in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_settings_that_contradict_each_other_are_refused() -> None:
    base: dict[str, Any] = {"type": "torch", "model": "p"}
    with pytest.raises(ValueError, match="needs total_steps"):
        TorchTrainerConfig.model_validate({**base, "optimizer": {"schedule": "cosine"}})
    with pytest.raises(ValueError, match="recompute_old_logprobs: true"):
        TorchTrainerConfig.model_validate({**base, "algorithm": {"type": "grpo", "off_policy": {}}})
    with pytest.raises(ValueError, match="unknown algorithm 'gpro'"):
        TorchTrainerConfig.model_validate({**base, "algorithm": {"type": "gpro"}})
