"""A language model in this process, through transformers: exact ids, exact log-probs, weights replaced in place.

Generation is our own loop (`decoding`), because the library's `generate` gives neither seeds per sequence nor the
log-probability of the distribution that was sampled.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from buffer_engine.errors import ModelError
from buffer_engine.extras import require
from buffer_engine.weights import WeightVersion
from explorers.base import Generation, GenerationRequest, Message
from explorers.models.base import ModelConfig
from explorers.models.chat_template import ChatTemplate
from explorers.models.decoding import Decoder, Row
from explorers.models.token_choice import logprob_kind
from explorers.models.weights_cache import resolve_model


class TransformersConfig(ModelConfig):
    """A local Hugging Face folder (or the packaged `smollm2-135m`), run in this process."""

    type: Literal["transformers"] = "transformers"
    path: str = Field(min_length=1, description="local Hugging Face folder, or smollm2-135m")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="float32 is exact, bfloat16 about twice as fast"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one, else cpu")
    attention: Literal["eager", "sdpa"] | None = Field(None, description="null: the library's choice")
    max_batch: int = Field(64, gt=0, description="most sequences decoded together")
    threads: int | None = Field(None, gt=0, description="torch threads of the process; null: leave as they are")
    default_system: bool = Field(True, description="false: drop the system turn that the chat template adds by itself")


class TransformersEngine:
    """An `Engine` on one transformers model. Not for use from two threads at once; calls wait for each other.

    Raises:
        ModelError: the folder is missing, incomplete or cannot be loaded, or the device is not there.
        MissingExtraError: torch or transformers is not installed.
    """

    Config: ClassVar[type[TransformersConfig]] = TransformersConfig

    def __init__(self, config: TransformersConfig) -> None:
        self.config = config
        self.folder = resolve_model(config.path)
        torch = require("torch", "torch")
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._lock = threading.Lock()
        self._version = 0
        self._network = _load_network(self.folder, config)
        self._tokenizer = _load_tokenizer(self.folder)
        end_ids = _end_ids(self._network, self._tokenizer)
        self._template = ChatTemplate(self._tokenizer, end_ids=end_ids, default_system=config.default_system)
        # The siblings of a group begin with the same prompt: it is tokenised once.
        self._render = lru_cache(maxsize=256)(lambda messages, tools: self._template.render(messages, tools=tools))
        self._tokenizer_id = _tokenizer_id(self.folder, self._tokenizer)
        self._decoder = Decoder(
            network=self._network,
            end_ids=end_ids,
            pad_id=self._tokenizer.pad_token_id
            if self._tokenizer.pad_token_id is not None
            else min(end_ids, default=0),
            decode=lambda ids: self._tokenizer.decode(list(ids), skip_special_tokens=False),
        )

    @property
    def model_version(self) -> int:
        """Version of the weights in use; 0 is what the folder held."""
        return self._version

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and reply together, from the model's configuration."""
        return int(self._network.config.max_position_embeddings)

    @property
    def tokenizer_id(self) -> str:
        """`name@hash` of the tokenizer file."""
        return self._tokenizer_id

    @property
    def template_hash(self) -> str:
        """Hash of the chat template and of whether its own system turn is used."""
        return self._template.hash

    def render(self, messages: Sequence[Message], *, tools: str | None = None) -> tuple[int, ...]:
        """Ids of the chat template applied to `messages`, with the generation prompt."""
        return self._render(tuple(messages), tools)

    def encode_dialogue(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Ids of a finished dialogue and a mask that is true on assistant tokens (their end token included)."""
        return self._template.encode_dialogue(messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled ids, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def generate(
        self, requests: Sequence[GenerationRequest], *, cancelled: Callable[[int], bool] | None = None
    ) -> list[Generation]:
        """Continue all sequences, at most `max_batch` together, in the order given; see `Engine.generate`."""
        found: dict[int, Generation] = {}
        fitting: list[tuple[int, GenerationRequest]] = []
        for index, request in enumerate(requests):
            length = len(request.prompt_ids)
            if length == 0:
                found[index] = self._refused(request, "context: the prompt is empty")
            elif length >= self.context_length:
                found[index] = self._refused(
                    request, f"context: the prompt has {length} tokens and the context holds {self.context_length}"
                )
            else:
                fitting.append((index, request))
        with self._lock:
            for start in range(0, len(fitting), self.config.max_batch):
                rows = self._decoder.run(
                    fitting[start : start + self.config.max_batch],
                    context_length=self.context_length,
                    cancelled=cancelled or _never,
                )
                found.update((row.index, self._finished(row)) for row in rows)
        return [found[index] for index in range(len(requests))]

    def load_weights(self, weights: WeightVersion) -> None:
        """Copy newer weights into the model's own parameters, cast to its dtype.

        Raises:
            ModelError: names or shapes differ from the model's, or the version carries neither tensors nor a folder.
                The weights in use stay as they were.
        """
        if weights.tensors is not None:
            tensors = weights.tensors
        elif weights.directory is not None:
            tensors = _read_folder(weights.directory)
        else:
            raise ModelError(f"weight version {weights.version} carries neither tensors nor a folder")
        with self._lock:
            _copy_into(self._network, tensors)
            self._version = weights.version

    def _refused(self, request: GenerationRequest, error: str) -> Generation:
        return Generation((), (), "error", False, self._version, logprob_kind(request.sampling), error)

    def _finished(self, row: Row) -> Generation:
        return Generation(
            token_ids=tuple(row.token_ids),
            logprobs=tuple(row.logprobs),
            stop_reason=row.stop_reason or "error",
            eos_sampled=row.stop_reason == "eos",
            model_version=self._version,
            logprob_kind=logprob_kind(row.request.sampling),
            error=row.error,
        )


def _never(index: int) -> bool:
    return False


def _load_network(folder: Path, config: TransformersConfig) -> Any:
    torch = require("torch", "torch")
    transformers = require("transformers", "torch")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ModelError("device: cuda, and torch sees no CUDA device → use device: auto or cpu")
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    options = {} if config.attention is None else {"attn_implementation": config.attention}
    transformers.utils.logging.disable_progress_bar()
    try:
        network = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, config.dtype), local_files_only=True, **options
        )
    except Exception as error:  # the loader raises many kinds for a damaged folder
        raise ModelError(f"model folder {folder} does not load: {error} → is it complete?") from error
    return network.eval().requires_grad_(False).to(device)


def _load_tokenizer(folder: Path) -> Any:
    transformers = require("transformers", "torch")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # as above
        raise ModelError(f"the tokenizer in {folder} does not load: {error}") from error


def _end_ids(network: Any, tokenizer: Any) -> frozenset[int]:
    """Every token id that ends a reply: the generation configuration's and the tokenizer's."""
    named = getattr(network.generation_config, "eos_token_id", None)
    listed = named if isinstance(named, list) else [named]
    return frozenset(int(token) for token in (*listed, tokenizer.eos_token_id) if token is not None)


def _tokenizer_id(folder: Path, tokenizer: Any) -> str:
    content = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    return f"{folder.name}@{hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}"


def _read_folder(folder: Path) -> dict[str, Any]:
    safetensors = require("safetensors.torch", "torch")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"weights folder {folder} has no *.safetensors file")
    tensors: dict[str, Any] = {}
    for file in files:
        tensors.update(safetensors.load_file(file))
    return tensors


def _copy_into(network: Any, tensors: Mapping[str, Any]) -> None:
    """Copy tensors into parameters and saved buffers of the same name; tied copies may be absent."""
    torch = require("torch", "torch")
    own: dict[str, Any] = network.state_dict()
    storage = {name: tensor.data_ptr() for name, tensor in own.items()}
    given = {storage[name] for name in tensors if name in storage}
    unknown = sorted(set(tensors) - set(own))
    missing = sorted(name for name in own if name not in tensors and storage[name] not in given)
    wrong = sorted(
        f"{name} {tuple(tensors[name].shape)} instead of {tuple(own[name].shape)}"
        for name in set(tensors) & set(own)
        if tensors[name].shape != own[name].shape
    )
    if unknown or missing or wrong:
        raise ModelError(
            "the new weights do not fit the explorer's model: "
            + "; ".join(
                f"{what}: {', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
                for what, names in (("unknown", unknown), ("missing", missing), ("shape", wrong))
                if names
            )
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
