"""Loading a causal language model for training, adding adapters, and reading its weights out again."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buffer_engine.errors import ModelError
from buffer_engine.extras import require
from trainers.torch_attention import IMPLEMENTATION, register
from trainers.torch_config import LoraConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ADAPTER = "default"


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """A causal language model in float32.

    Attributes:
        model: the transformers model; with LoRA, its linear layers are wrapped in place.
        decoder: the part that maps ids to hidden states [1, T, H].
        head: the layer that maps hidden states to logits over the vocabulary.
        adapters: the PEFT wrapper around `model`; None: full fine-tuning.
        directory: folder it came from.
    """

    model: Any
    decoder: Any
    head: Any
    adapters: Any | None
    directory: Path

    def trainable(self) -> dict[str, Tensor]:
        """Name → parameter with gradient, in a fixed order."""
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @contextmanager
    def without_adapters(self) -> Generator[None]:
        """The frozen model inside the block; does nothing without adapters."""
        if self.adapters is None:
            yield
            return
        with self.adapters.disable_adapter():
            yield

    def weights(self) -> dict[str, Tensor]:
        """Name → tensor as the plain model has them; detached.

        Without adapters the tensors are the trained ones themselves. With adapters, each adapted matrix is a new
        tensor, base + delta; neither the base nor the adapter is touched.
        """
        import torch

        wrapped: dict[str, Any] = {
            name: module
            for name, module in self.model.named_modules()
            if hasattr(module, "get_base_layer") and hasattr(module, "get_delta_weight")
        }
        tensors: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, tensor in self.model.state_dict(keep_vars=False).items():
                owner, inside, rest = name.partition(".base_layer.")
                if inside and owner in wrapped:
                    plain = f"{owner}.{rest}"
                    tensors[plain] = tensor + wrapped[owner].get_delta_weight(ADAPTER) if rest == "weight" else tensor
                elif name.partition(".lora_")[0] not in wrapped:
                    tensors[name] = tensor
        return tensors


def load_model(directory: Path, *, attention: str, lora: LoraConfig | None, checkpointing: bool) -> TrainableModel:
    """The model of a Hugging Face folder, in float32, ready to train. Draws from torch's generator for new adapters.

    Raises:
        ModelError: the folder is missing, has no configuration or weights, is quantised, lacks tensors, or the model
            computes its logits in a way that the trainer does not.
        MissingExtraError: torch, transformers or (for LoRA) peft is not installed.
    """
    torch = require("torch", "torch")
    transformers = require("transformers", "torch")
    _check_folder(directory)
    if attention == "packed":
        register()
    model = _read(directory, torch, transformers, implementation=IMPLEMENTATION if attention == "packed" else "eager")
    model.requires_grad_(True)
    adapters: Any | None = None
    if lora is not None:
        adapters = _add_adapters(model, lora)
    if checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ModelError(f"{type(model).__name__} has no gradient checkpointing: set gradient_checkpointing: false")
        # The call has a new name in newer releases of transformers, and the old one warns there.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{directory}: {type(model).__name__} has no output embeddings; it is no language model")
    return TrainableModel(model, model.get_decoder(), head, adapters, directory)


def _check_folder(directory: Path) -> None:
    if not directory.is_dir():
        raise ModelError(f"model folder {directory} does not exist: give a local Hugging Face folder")
    if not (directory / "config.json").is_file():
        found = ", ".join(sorted(path.name for path in directory.iterdir())[:8]) or "nothing"
        raise ModelError(f"model folder {directory} has no config.json (it holds: {found})")
    if not list(directory.glob("*.safetensors")):
        raise ModelError(f"model folder {directory} has no *.safetensors file; other formats are not read (no pickle)")


def _read(directory: Path, torch: Any, transformers: Any, *, implementation: str) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        if getattr(config, "quantization_config", None) is not None:
            raise ModelError(f"{directory} holds quantised weights, which cannot be trained: convert them to float32")
        with _no_progress_bar():
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=torch.float32,
                attn_implementation=implementation,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"{directory} cannot be loaded as a causal language model: {error}") from error
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if missing or mismatched:
        names = ", ".join(str(name) for name in [*missing, *mismatched][:4])
        raise ModelError(
            f"{directory} is incomplete: {len(missing)} tensors are missing and {len(mismatched)} have another shape "
            f"({names}); random weights would take their place"
        )
    wrong = [name for name, value in model.named_parameters() if value.dtype != torch.float32]
    if wrong:
        raise ModelError(f"{directory}: {wrong[0]} is not float32 after loading, so it cannot be trained")
    return model


@contextmanager
def _no_progress_bar() -> Generator[None]:
    """Without transformers' bar inside the block: the command line draws its own progress."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _add_adapters(model: Any, lora: LoraConfig) -> Any:
    peft = require("peft", "torch")
    target = lora.target if isinstance(lora.target, str) else list(lora.target)
    try:
        return peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                target_modules=target,
                task_type="CAUSAL_LM",
            ),
            adapter_name=ADAPTER,
        )
    except ValueError as error:
        raise ModelError(f"LoRA cannot be added to {type(model).__name__}: {error}") from error
