"""The decoding loop: continue a batch of token sequences with a key-value cache that shrinks as rows finish.

Equal prompts are read once and their cache is copied to the siblings, because a group plays one prompt many times.
Rows that end leave the batch at once, so that the last long reply costs one row and not the whole batch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from buffer_engine.extras import require
from explorers.base import GenerationRequest, StopReason
from explorers.models.token_choice import choose_tokens, uniforms

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Row:
    """One sequence on its way: the request, its uniforms, and what was sampled so far."""

    index: int
    request: GenerationRequest
    most: int
    drawn: list[float]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: StopReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Decoder:
    """What the loop needs of a model: the network, its end tokens, and text for stop strings.

    Attributes:
        decode: ids → text with special tokens, used only to look for stop strings.
    """

    network: Any
    end_ids: frozenset[int]
    pad_id: int
    decode: Callable[[Sequence[int]], str]

    def run(
        self,
        requests: Sequence[tuple[int, GenerationRequest]],
        *,
        context_length: int,
        cancelled: Callable[[int], bool],
    ) -> list[Row]:
        """Decode all requests to their end, in one batch; rows come back in the order given.

        A row ends on an end token, on a stop string, after its most tokens, at the context's end, when `cancelled` of
        its index is true, or when its logits are not finite; the last two carry an `error`.
        """
        torch = require("torch", "torch")
        rows = [_row(index, request, context_length) for index, request in requests]
        with torch.inference_mode():
            self._decode_rows(rows, cancelled)
        return rows

    def _decode_rows(self, rows: list[Row], cancelled: Callable[[int], bool]) -> None:
        torch = require("torch", "torch")
        live = list(rows)
        logits_B_V, cache, mask_B_T = self._read_prompts(live)
        while True:
            self._choose(live, logits_B_V, cancelled)
            keep = [at for at, row in enumerate(live) if row.stop_reason is None]
            if not keep:
                return
            if len(keep) < len(live):
                index = torch.tensor(keep, device=mask_B_T.device)
                cache.batch_select_indices(index)
                mask_B_T = mask_B_T[index]
                live = [live[at] for at in keep]
            mask_B_T = torch.cat([mask_B_T, mask_B_T.new_ones(len(live), 1)], dim=1)
            newest_B_1 = torch.tensor([[row.token_ids[-1]] for row in live], device=mask_B_T.device)
            logits_B_V = self.network(
                input_ids=newest_B_1,
                attention_mask=mask_B_T,
                position_ids=mask_B_T.sum(dim=1, keepdim=True) - 1,
                use_cache=True,
                **{_cache_argument(self.network): cache},
            ).logits[:, -1]

    def _read_prompts(self, rows: Sequence[Row]) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """Last logits [B, V], cache and attention mask [B, T] after the prompts, each distinct prompt read once."""
        torch = require("torch", "torch")
        transformers = require("transformers", "torch")
        prompts = list(dict.fromkeys(row.request.prompt_ids for row in rows))
        width = max(map(len, prompts))
        device = self.network.device
        # Padding on the left keeps the newest position of every row in the last column.
        padded = [[self.pad_id] * (width - len(ids)) + list(ids) for ids in prompts]
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
        cache = transformers.DynamicCache(config=self.network.config)
        logits = self.network(
            input_ids=torch.tensor(padded, device=device),
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
            **{_cache_argument(self.network): cache},
        ).logits[:, -1]
        place = {ids: at for at, ids in enumerate(prompts)}
        copies = torch.tensor([place[row.request.prompt_ids] for row in rows], device=device)
        cache.batch_select_indices(copies)
        return logits[copies], cache, mask[copies]

    def _choose(self, rows: Sequence[Row], logits_B_V: torch.Tensor, cancelled: Callable[[int], bool]) -> None:
        torch = require("torch", "torch")
        lowest_B, highest_B = torch.aminmax(logits_B_V, dim=-1)  # both hand NaN on
        finite: list[bool] = (torch.isfinite(lowest_B) & torch.isfinite(highest_B)).tolist()
        if not all(finite):
            logits_B_V = torch.nan_to_num(logits_B_V)
        tokens, logprobs = choose_tokens(
            logits_B_V,
            [row.request.sampling for row in rows],
            [row.drawn[len(row.token_ids)] for row in rows],
        )
        # Per row in Python: each row has its own end, and the work per row is far below one forward pass.
        for row, token, logprob, sound in zip(rows, tokens, logprobs, finite, strict=True):
            if cancelled(row.index):
                row.stop_reason, row.error = "error", "cancelled: nobody waits for the reply any more"
            elif not sound:
                row.stop_reason = "error"
                row.error = "engine: the model's logits are not finite (have the weights diverged?)"
            else:
                row.token_ids.append(token)
                row.logprobs.append(logprob)
                row.stop_reason = self._reason(row)

    def _reason(self, row: Row) -> StopReason | None:
        if row.token_ids[-1] in self.end_ids:
            return "eos"
        stops = row.request.sampling.stop
        if stops:
            # A character takes at most four byte tokens, so an unseen stop string lies within this many.
            tail = self.decode(row.token_ids[-(4 * max(map(len, stops)) + 16) :])
            if any(stop in tail for stop in stops):
                return "stop"
        return "length" if len(row.token_ids) >= row.most else None


@functools.cache
def _forward_arguments(forward: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def _cache_argument(network: Any) -> str:
    # transformers renamed the argument within its fifth major version.
    return "cache" if "cache" in _forward_arguments(type(network).forward) else "past_key_values"


def _row(index: int, request: GenerationRequest, context_length: int) -> Row:
    most = min(request.sampling.max_tokens, context_length - len(request.prompt_ids))
    return Row(index, request, most, uniforms(request.seed, most))
