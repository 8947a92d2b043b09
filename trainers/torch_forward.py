"""Log-probabilities of the trained tokens of a micro-batch: hidden states once, vocabulary rows a chunk at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from buffer_engine.errors import ModelError
from trainers.packing import PackedBatch
from trainers.torch_attention import segments
from trainers.torch_model import TrainableModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForwardSettings:
    """How to run the model.

    Attributes:
        packed: rows end to end in one sequence; otherwise padded to the longest of the micro-batch.
        bfloat16: run matrix products in bfloat16; log-probs are float32 all the same.
        logit_chunk: positions whose logits exist at once.
        recompute: compute a chunk's logits again in the backward pass instead of keeping them.
        temperature: what logits are divided by; log-probs and entropy are those of the softmax after it.
        entropy: also return the entropy at each position.
    """

    packed: bool
    bfloat16: bool
    logit_chunk: int
    recompute: bool
    temperature: float = 1.0
    entropy: bool = False


def computes_bfloat16(device: str) -> bool:
    """Whether `device` (cpu or cuda) multiplies bfloat16 matrices in hardware."""
    import torch

    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Releases before get_capabilities cannot be asked; float32 is right everywhere.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def token_logprobs(
    model: TrainableModel, batch: PackedBatch, settings: ForwardSettings
) -> tuple[Tensor, Tensor | None]:
    """ℓ of each trained token, float32 [N], nats, and the detached entropy at its position, [N] or None."""
    import torch
    from torch.utils.checkpoint import checkpoint

    device = model.device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=settings.bfloat16):
        hidden = _hidden(model, batch, settings.packed, device)
        labels = torch.from_numpy(batch.token_ids[batch.trained]).to(device)
        logprobs: list[Tensor] = []
        entropies: list[Tensor] = []
        for start in range(0, len(labels), settings.logit_chunk):
            part = slice(start, start + settings.logit_chunk)
            arguments = (model.head, hidden[part], labels[part], settings.temperature, settings.entropy)
            if settings.recompute and torch.is_grad_enabled():
                chunk, entropy = checkpoint(_chunk, *arguments, use_reentrant=False)
            else:
                chunk, entropy = _chunk(*arguments)
            logprobs.append(chunk)
            if entropy is not None:
                entropies.append(entropy)
    return torch.cat(logprobs), torch.cat(entropies) if entropies else None


def _hidden(model: TrainableModel, batch: PackedBatch, packed: bool, device: torch.device) -> Tensor:
    """Hidden states of the positions before the trained tokens, [N, H]."""
    import torch

    predictors = batch.predictors
    if packed:
        states = model.decoder(
            input_ids=torch.from_numpy(batch.token_ids)[None].to(device),
            position_ids=torch.from_numpy(batch.position_ids)[None].to(device),
            use_cache=False,
            segments=segments(batch.cu_seqlens, batch.prefixes, device),
        ).last_hidden_state[0]
        return states.index_select(0, torch.from_numpy(predictors).to(device))
    lengths = np.diff(batch.cu_seqlens)
    width = int(lengths.max())
    real = np.arange(width)[None, :] < lengths[:, None]
    ids = np.zeros((len(lengths), width), dtype=np.int64)
    ids[real] = batch.token_ids
    states = model.decoder(
        input_ids=torch.from_numpy(ids).to(device),
        attention_mask=torch.from_numpy(real.astype(np.int64)).to(device),
        position_ids=torch.from_numpy(np.arange(width)[None, :].repeat(len(lengths), axis=0)).to(device),
        use_cache=False,
    ).last_hidden_state
    slots = batch.trained_rows * width + batch.position_ids[predictors]
    return states.reshape(-1, states.shape[-1]).index_select(0, torch.from_numpy(slots).to(device))


def _chunk(
    head: Any, hidden: Tensor, labels: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `labels` [n] given hidden states [n, H]; the logits [n, V] do not outlive the call."""
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    normaliser = logits.logsumexp(-1)
    chosen = logits.gather(-1, labels[:, None])[:, 0] - normaliser
    if not entropy:
        return chosen, None
    scores = logits.detach() - normaliser.detach()[:, None]
    return chosen, -(scores.exp() * scores).sum(-1)


def check_model(model: TrainableModel, *, packed: bool) -> None:
    """Refuse a model whose log-probs would come out wrong here.

    Raises:
        ModelError: its logits are more than its head applied to its hidden states (capped or scaled), or a packed row
            is influenced by its neighbours (recurrent layers, attention of its own).
    """
    import torch

    name = type(model.model).__name__
    vocabulary = model.head.weight.shape[0]
    ids = torch.arange(5, device=model.device) % vocabulary
    bounds, alone = np.array([0, 5], dtype=np.int32), np.array([-1], dtype=np.int64)
    extra = {"segments": segments(bounds, alone, model.device)} if packed else {}
    training = model.model.training
    model.model.eval()
    with torch.no_grad():
        own = model.model(input_ids=ids[None], use_cache=False, **extra).logits[0]
        states = model.decoder(input_ids=ids[None], use_cache=False, **extra).last_hidden_state[0]
        ours = model.head(states)
        if packed:
            # A row of its own, then two rows that share tokens 0 and 1: 0 1 2 | 0 1 | 2 3 4 | 2
            mixed = torch.cat([ids[:3], ids[:2], ids[2:], ids[2:3]])
            places = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 2], device=model.device)
            layout = segments(np.array([0, 3, 5, 8, 9], dtype=np.int32), np.array([-1, -1, 1, 1]), model.device)
            together = model.decoder(
                input_ids=mixed[None], position_ids=places[None], use_cache=False, segments=layout
            ).last_hidden_state[0]
            if not torch.allclose(together, states[places], atol=1e-3, rtol=1e-3):
                raise ModelError(f"{name} mixes rows that are packed into one sequence: use `attention: eager`")
    model.model.train(training)
    if own.shape != ours.shape or not torch.allclose(own, ours, atol=1e-4, rtol=1e-4):
        raise ModelError(
            f"{name} changes its logits after the output layer (capped or scaled), which this trainer does not "
            "reproduce: its log-probs would be wrong. Use another model."
        )
