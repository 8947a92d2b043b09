"""Checkpoints and weight folders of the torch trainer: safetensors and JSON, no pickle."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from buffer_engine.atomic_folder import atomic_folder
from buffer_engine.errors import TrainingError
from buffer_engine.extras import require
from buffer_engine.identity import stable_digest
from trainers.torch_model import TrainableModel
from trainers.torch_optimizer import Optimizer

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
WEIGHTS, OPTIMIZER, GENERATORS, STATE = (
    "weights.safetensors",
    "optimizer.safetensors",
    "rng.safetensors",
    "trainer.json",
)
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def save_checkpoint(
    directory: Path,
    *,
    model: TrainableModel,
    optimizer: Optimizer,
    generators: Mapping[str, Tensor],
    state: Mapping[str, int | bool],
) -> None:
    """Write everything a trainer needs to go on, complete or not at all.

    With adapters only these are written: the frozen weights are those of the model's folder, whose identity is noted.

    Args:
        generators: name → state of a random generator, uint8.
        state: counters of the trainer.
    """
    with atomic_folder(directory) as folder:
        _write(folder / WEIGHTS, _own_weights(model))
        _write(folder / OPTIMIZER, optimizer.state())
        _write(folder / GENERATORS, generators)
        record = {"format": FORMAT, "state": dict(state), "base": _base_identity(model)}
        (folder / STATE).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_checkpoint(
    directory: Path, *, model: TrainableModel, optimizer: Optimizer
) -> tuple[dict[str, Tensor], dict[str, int | bool]]:
    """Put weights and optimizer back, bit for bit; returns the generators' states and the trainer's counters.

    Raises:
        TrainingError: the checkpoint is missing, incomplete, of a newer format, or of another model or LoRA setting;
            weights and optimizer are unchanged.
    """
    import torch

    missing = [name for name in (WEIGHTS, OPTIMIZER, GENERATORS, STATE) if not (directory / name).is_file()]
    if missing:
        raise TrainingError(f"{directory} is no complete checkpoint: {', '.join(missing)} not there")
    record = _record(directory / STATE)
    if record["format"] > FORMAT:
        raise TrainingError(f"{directory} has checkpoint format {record['format']}; this version reads up to {FORMAT}")
    if record["base"] != _base_identity(model):
        raise TrainingError(
            f"{directory} was written for another model folder or LoRA setting than {model.directory}: "
            "continue with the specification that began the run"
        )
    stored = _read(directory / WEIGHTS)
    own = _own_weights(model)
    if set(stored) != set(own) or any(stored[name].shape != own[name].shape for name in own):
        raise TrainingError(f"{directory} holds {len(stored)} tensors that do not fit the model's {len(own)}")
    generators = _read(directory / GENERATORS)
    optimizer.load_state({name: value.to(model.device) for name, value in _read(directory / OPTIMIZER).items()})
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(stored[name])
    return generators, record["state"]


def save_weights(directory: Path, model: TrainableModel) -> None:
    """Write a Hugging Face folder that AutoModelForCausalLM and AutoTokenizer open, complete or not at all.

    Weights are float32, adapters merged; tokenizer and other small files are those of the model's folder.
    """
    with atomic_folder(directory) as folder:
        for path in sorted(model.directory.iterdir()):
            if path.is_file() and path.suffix not in NOT_COPIED and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
        model.model.config.save_pretrained(folder)
        _write(folder / "model.safetensors", _distinct(model.weights()), metadata={"format": "pt"})


def _own_weights(model: TrainableModel) -> dict[str, Tensor]:
    """The tensors a checkpoint holds, not copied: all of the model, or only its adapters."""
    if model.adapters is not None:
        return {name: value.detach() for name, value in model.trainable().items()}
    return _distinct(model.model.state_dict())


def _distinct(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` without second names of the same memory (tied weights)."""
    seen: set[int] = set()
    distinct: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            distinct[name] = tensor
    return distinct


def _base_identity(model: TrainableModel) -> str:
    """Identity of what the checkpoint builds on: shapes for full training; folder content size and LoRA otherwise."""
    shapes = {name: list(value.shape) for name, value in sorted(_own_weights(model).items())}
    if model.adapters is None:
        return stable_digest(shapes)
    files = sorted((path.name, path.stat().st_size) for path in model.directory.glob("*.safetensors"))
    settings = model.adapters.peft_config["default"]
    return stable_digest(shapes, files, settings.r, settings.lora_alpha, settings.lora_dropout)


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    files = require("safetensors.torch", "torch")
    failure = require("safetensors", "torch").SafetensorError
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        files.save_file(plain, str(path), metadata=metadata)
    except failure as error:
        # The library has an error of its own for a full disk, which callers of a file operation do not expect.
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _record(path: Path) -> dict[str, Any]:
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TrainingError(f"{path} cannot be read: {error}") from error
    if not isinstance(record, dict) or not {"format", "state", "base"} <= set(cast("dict[str, Any]", record)):
        raise TrainingError(f"{path} is no checkpoint's record: it needs format, state and base")
    return cast("dict[str, Any]", record)


def _read(path: Path) -> dict[str, Tensor]:
    files = require("safetensors.torch", "torch")
    try:
        tensors: dict[str, Tensor] = files.load_file(str(path))
    except Exception as error:
        raise TrainingError(f"{path} cannot be read: {error}") from error
    return tensors
