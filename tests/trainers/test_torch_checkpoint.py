"""Checkpoints bit for bit, weight folders, and folders that are complete or absent."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_samples
from torch_samples import bytes_of, chosen, distributions, random_rows

from buffer_engine.atomic_folder import atomic_folder
from buffer_engine.errors import TrainingError
from trainers.torch_trainer import TorchTrainer

FULL: dict[str, Any] = {}
LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8, "dropout": 0.2}}


def make_trainer(folder: Path, **fields: Any) -> TorchTrainer:
    optimizer = {"learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2}
    return torch_samples.make_trainer(folder, optimizer=optimizer, **fields)


def batches(make_batch: Any, count: int = 3) -> list[Any]:
    return [make_batch(random_rows(5, seed=step, low=5, high=20), step=step) for step in range(1, count + 1)]


@pytest.mark.parametrize("fields", [FULL, LORA], ids=["full", "lora"])
def test_a_resumed_run_ends_with_the_same_bytes(
    tiny_folder: Path, make_batch: Any, tmp_path: Path, fields: dict[str, Any]
) -> None:
    steps = batches(make_batch)
    straight = make_trainer(tiny_folder, **fields)
    for batch in steps:
        straight.train_step(batch)
    first = make_trainer(tiny_folder, **fields)
    first.train_step(steps[0])
    first.save_checkpoint(tmp_path / "step-1")
    torch.rand(7)  # numbers drawn elsewhere in the process change nothing
    resumed = make_trainer(tiny_folder, seed=99, **fields)
    resumed.load_checkpoint(tmp_path / "step-1")
    assert bytes_of(resumed) == bytes_of(first)
    for batch in steps[1:]:
        resumed.train_step(batch)
    assert bytes_of(resumed) == bytes_of(straight)
    assert bytes_of(straight) != bytes_of(first)


@pytest.mark.parametrize("fields", [FULL, LORA], ids=["full", "lora"])
def test_two_runs_with_one_seed_are_equal(tiny_folder: Path, make_batch: Any, fields: dict[str, Any]) -> None:
    runs: list[Any] = []
    for noise in (0, 5):
        torch.manual_seed(noise)
        trainer = make_trainer(tiny_folder, **fields)
        reports = []
        for batch in batches(make_batch):
            metrics = dict(trainer.train_step(batch).metrics)
            reports.append({name: v for name, v in metrics.items() if name not in ("seconds", "tokens_per_second")})
        runs.append((bytes_of(trainer), reports))
    assert runs[0] == runs[1]


def test_a_step_leaves_the_process_generator_and_determinism_alone(tiny_folder: Path, make_batch: Any) -> None:
    trainer = make_trainer(tiny_folder, **LORA)
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    trainer.train_step(batches(make_batch, 1)[0])
    assert torch.equal(torch.rand(3), expected)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_checkpoint_is_safetensors_and_json_and_holds_only_what_is_trained(
    tiny_folder: Path, make_batch: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(tiny_folder, **LORA)
    trainer.train_step(batches(make_batch, 1)[0])
    trainer.save_checkpoint(tmp_path / "c")
    names = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert names == ["optimizer.safetensors", "rng.safetensors", "trainer.json", "weights.safetensors"]
    from safetensors.torch import load_file

    assert all(".lora_" in name for name in load_file(tmp_path / "c" / "weights.safetensors"))
    assert json.loads((tmp_path / "c" / "trainer.json").read_text())["state"] == {"gate_passed": True, "steps": 1}


def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(
    tiny_folder: Path, make_batch: Any, tmp_path: Path
) -> None:
    make_trainer(tiny_folder, **LORA).save_checkpoint(tmp_path / "lora")
    full = make_trainer(tiny_folder)
    full.save_checkpoint(tmp_path / "full")
    before = bytes_of(full)
    with pytest.raises(TrainingError, match="another model folder or LoRA setting"):
        full.load_checkpoint(tmp_path / "lora")
    with pytest.raises(TrainingError, match=r"no complete checkpoint: weights\.safetensors"):
        full.load_checkpoint(tmp_path / "absent")
    newer = json.loads((tmp_path / "full" / "trainer.json").read_text()) | {"format": 2}
    (tmp_path / "full" / "trainer.json").write_text(json.dumps(newer))
    with pytest.raises(TrainingError, match="format 2; this version reads up to 1"):
        full.load_checkpoint(tmp_path / "full")
    assert bytes_of(full) == before


@pytest.mark.parametrize("part", ["weights.safetensors", "optimizer.safetensors", "rng.safetensors", "trainer.json"])
def test_a_checkpoint_with_a_torn_file_changes_nothing(
    tiny_folder: Path, make_batch: Any, tmp_path: Path, part: str
) -> None:
    steps = batches(make_batch)
    trained = make_trainer(tiny_folder)
    trained.train_step(steps[0])
    trained.save_checkpoint(tmp_path / "step-1")
    torn = tmp_path / "step-1" / part
    torn.write_bytes(torn.read_bytes()[:-20])
    trainer, untouched = make_trainer(tiny_folder), make_trainer(tiny_folder)
    with pytest.raises(TrainingError, match=f"{part} cannot be read"):
        trainer.load_checkpoint(tmp_path / "step-1")
    for one in (trainer, untouched):  # the step also shows that optimizer and counters are as they were
        one.train_step(steps[1])
    assert bytes_of(trainer) == bytes_of(untouched)


def test_a_saved_folder_keeps_the_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make_trainer(tiny_model).save_weights(tmp_path / "weights")
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (tiny_model, tmp_path / "weights"))
    message = [{"role": "user", "content": "2 + 2?"}]
    assert after.apply_chat_template(message) == before.apply_chat_template(message)


@pytest.mark.parametrize("fields", [FULL, LORA], ids=["full", "lora"])
def test_saved_weights_open_in_transformers_and_say_the_same(
    tiny_folder: Path, make_batch: Any, tmp_path: Path, fields: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    trainer = make_trainer(tiny_folder, **fields)
    steps = batches(make_batch)
    for batch in steps:
        trainer.train_step(batch)
    trainer.save_weights(tmp_path / "weights")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    ids = steps[0].rows.column("token_ids")[0].as_py()
    theirs = chosen(distributions(model, ids), ids)
    ours = trainer.log_probs(steps[0]).values[0].as_py()[1:]
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert (tmp_path / "weights" / "generation_config.json").is_file()
    # The saved folder is also a folder to train from, and published weights load into the plain model as they are.
    again = make_trainer(tmp_path / "weights")
    np.testing.assert_allclose(again.log_probs(steps[0]).values[0].as_py()[1:], ours, atol=1e-5)
    published: Any = trainer.weights(4)
    assert published.version == 4
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder)
    plain.load_state_dict(published.tensors, strict=True)
    np.testing.assert_allclose(chosen(distributions(plain, ids), ids), ours, atol=1e-5)


def test_publishing_merged_weights_touches_neither_base_nor_adapter(tiny_folder: Path, make_batch: Any) -> None:
    watched, other = make_trainer(tiny_folder, **LORA), make_trainer(tiny_folder, **LORA)
    for batch in batches(make_batch):
        watched.train_step(batch)
        tensors: Any = watched.weights(1).tensors
        for name, tensor in tensors.items():
            if "q_proj" in name:
                tensor.zero_()
        other.train_step(batch)
    assert bytes_of(watched) == bytes_of(other)


def test_full_weights_are_shared_not_copied(tiny_folder: Path, make_batch: Any) -> None:
    trainer = make_trainer(tiny_folder)
    tensors: Any = trainer.weights(0).tensors
    before = tensors["model.norm.weight"].clone()
    trainer.train_step(batches(make_batch, 1)[0])
    assert not torch.equal(tensors["model.norm.weight"], before)


# ---- atomic folders


def test_a_folder_whose_writing_fails_is_as_before(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "f") as folder:
        (folder / "a").write_text("old")

    def fail() -> None:
        with atomic_folder(tmp_path / "f") as folder:
            (folder / "a").write_text("new")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert (tmp_path / "f" / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    with atomic_folder(tmp_path / "f") as folder:
        (folder / "b").write_text("new")
    assert [path.name for path in (tmp_path / "f").iterdir()] == ["b"]


KILLED = """
import sys
from pathlib import Path
from buffer_engine.atomic_folder import atomic_folder
for round in range(10**9):
    with atomic_folder(Path(sys.argv[1])) as folder:
        for name in ("a", "b", "c"):
            (folder / name).write_text(str(round) * 1000)
    print(round, flush=True)
"""


def test_a_killed_writer_leaves_a_complete_folder(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    for attempt in range(6):
        place = tmp_path / f"f{attempt}"
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(place)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": root},
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.003 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        # Between the two renames of a replacement the complete old content stands beside its place.
        found = place if place.exists() else place.with_name(f".{place.name}.old")
        contents = {(found / name).read_text() for name in ("a", "b", "c")}
        assert len(contents) == 1
        assert len(contents.pop()) % 1000 == 0


def test_batches_of_the_same_rows_and_other_ids_train_alike(tiny_folder: Path, make_batch: Any) -> None:
    batch = batches(make_batch, 1)[0]
    first, second = make_trainer(tiny_folder), make_trainer(tiny_folder)
    first.train_step(batch)
    second.train_step(dataclasses.replace(batch, batch_id="other", step=9))
    assert bytes_of(first) == bytes_of(second)
