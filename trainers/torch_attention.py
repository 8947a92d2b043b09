"""Causal attention over packed rows: every row attends to itself only, whatever its neighbours are.

The model sees one sequence of T tokens. Here the rows are gathered into a few blocks of similar length, each block is
attended at once, and the result is scattered back. Short blocks use plain matrix products, because the fused kernel's
backward pass is slow for many short sequences on a CPU; long ones use the fused kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from buffer_engine.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IMPLEMENTATION = "buffer_engine_packed"
SHORT = 192
"""Rows up to this many tokens use plain products."""
WASTE = 0.8
"""A row joins a block only if it is at least this share of the block's longest row."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows attended together: `gather` int64 [r·L] are positions in T (a row's last one repeated as padding)."""

    gather: Tensor
    rows: int
    length: int


@dataclass(frozen=True, slots=True)
class Segments:
    """How a packed sequence falls into rows.

    Attributes:
        blocks: the rows, grouped by length.
        scatter: for each position of T, where it lies in the blocks' outputs laid end to end, int64 [T].
        longest: tokens of the longest row.
    """

    blocks: tuple[Block, ...]
    scatter: Tensor
    longest: int


def segments(cu_seqlens: npt.NDArray[np.int32], device: torch.device) -> Segments:
    """Blocks of the rows that `cu_seqlens` [r + 1] delimits."""
    import torch

    starts = cu_seqlens[:-1].astype(np.int64)
    lengths = np.diff(cu_seqlens).astype(np.int64)
    order = np.argsort(-lengths, kind="stable")
    scatter = np.empty(int(cu_seqlens[-1]), dtype=np.int64)
    blocks: list[Block] = []
    begin, offset = 0, 0
    while begin < len(order):
        length = int(lengths[order[begin]])
        end = begin + int(np.count_nonzero(lengths[order[begin:]] >= WASTE * length))
        members = order[begin:end]
        steps = np.arange(length, dtype=np.int64)
        inside = np.minimum(steps[None, :], lengths[members, None] - 1)
        gather = starts[members, None] + inside
        real = steps[None, :] < lengths[members, None]
        places = offset + np.arange(len(members) * length, dtype=np.int64).reshape(len(members), length)
        scatter[gather[real]] = places[real]
        blocks.append(Block(torch.from_numpy(gather.reshape(-1)).to(device), len(members), length))
        offset += len(members) * length
        begin = end
    return Segments(tuple(blocks), torch.from_numpy(scatter).to(device), int(lengths.max()))


def register() -> None:
    """Make the implementation known to transformers; repeating it is harmless.

    No mask function is registered with it, so transformers builds no mask: `segments` says it all.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _attention)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [1, H, T, D], key and value [1, H_kv, T, D]; returns [1, T, H, D]."""
    import torch

    layout = _layout(module, query, attention_mask, dropout, options)
    heads, width = query.shape[1], query.shape[3]
    kv_heads, value_width = key.shape[1], value.shape[3]
    scale = width**-0.5 if scaling is None else scaling
    flat = [part[0].transpose(0, 1).reshape(part.shape[2], -1) for part in (query, key, value)]
    outputs: list[Tensor] = []
    for block in layout.blocks:
        rows, length = block.rows, block.length
        q, k, v = (part.index_select(0, block.gather).view(rows, length, -1) for part in flat)
        q = q.view(rows, length, kv_heads, heads // kv_heads, width).permute(0, 2, 3, 1, 4)
        k = k.view(rows, length, kv_heads, width).transpose(1, 2)
        v = v.view(rows, length, kv_heads, value_width).transpose(1, 2)
        attend = _short if length <= SHORT else _long
        outputs.append(attend(q, k, v, scale).permute(0, 3, 1, 2, 4).reshape(rows * length, heads * value_width))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, layout.scatter).view(1, query.shape[2], heads, value_width), None


def _short(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Plain causal attention: q [r, H_kv, G, L, D], k and v [r, H_kv, L, D]; returns [r, H_kv, G, L, D]."""
    import torch

    rows, kv_heads, group, length, width = q.shape
    scores = torch.matmul(q.reshape(rows, kv_heads, group * length, width) * scale, k.transpose(2, 3))
    scores = scores.view(rows, kv_heads, group, length, length)
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    weights = scores.float().masked_fill(future, float("-inf")).softmax(-1).to(v.dtype)
    out = torch.matmul(weights.view(rows, kv_heads, group * length, length), v)
    return out.view(rows, kv_heads, group, length, v.shape[-1])


def _long(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The fused kernel on the same shapes; q, k and v are brought to one dtype, which it insists on."""
    import torch

    rows, kv_heads, group, length, _ = q.shape
    out = torch.nn.functional.scaled_dot_product_attention(
        q.reshape(rows, kv_heads * group, length, -1).to(v.dtype),
        k.repeat_interleave(group, dim=1).to(v.dtype),
        v.repeat_interleave(group, dim=1),
        is_causal=True,
        scale=scale,
    )
    return out.view(rows, kv_heads, group, length, v.shape[-1])


def _layout(
    module: Any, query: Tensor, attention_mask: Tensor | None, dropout: float, options: dict[str, Any]
) -> Segments:
    """The segments passed along with the call, or a ModelError that says why the model cannot be packed."""
    advice = f"{type(module).__name__} cannot run packed: use `attention: eager`"
    layout = options.get("segments")
    if not isinstance(layout, Segments):
        raise ModelError(f"{advice} (it does not pass keyword arguments on to its attention)")
    if attention_mask is not None or query.shape[0] != 1:
        raise ModelError(f"{advice} (it hands its attention a mask or more than one sequence)")
    window = options.get("sliding_window")
    if window is not None and layout.longest > window:
        raise ModelError(f"{advice} (its sliding window of {window} is shorter than a row of {layout.longest} tokens)")
    if (
        options.get("softcap") is not None
        or options.get("position_bias") is not None
        or options.get("s_aux") is not None
    ):
        raise ModelError(f"{advice} (its attention caps, biases or sinks its scores)")
    if dropout > 0 or options.get("is_causal", True) is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"{advice} (its attention has dropout or is not causal)")
    return layout
