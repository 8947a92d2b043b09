"""Causal attention over packed rows: every row attends to itself only, whatever its neighbours are.

The model sees one sequence of T tokens. Here its segments (rows, shared prompts, and what rows add to these) are
gathered into a few blocks of similar length, each block is attended at once, and the result is scattered back. Short
blocks use plain matrix products, because the fused kernel's backward pass is slow for many short sequences on a CPU;
long ones use the fused kernel.
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
"""Blocks with up to this many keys use plain products."""
WASTE = 0.8
"""A segment joins a block only if it sees at least this share of the keys of the block's longest."""


@dataclass(frozen=True, slots=True)
class Block:
    """Segments attended together: r of them, padded to Q queries and K keys.

    Attributes:
        queries, keys: positions in T, int64 [r·Q] and [r·K]; the last one is repeated as padding. Keys are those of
            the prefix, then the segment's own.
        before: tokens of each segment's prefix, int64 [r]: query i sees keys 0 … before + i.
        plain: no segment has a prefix, so that Q = K and the causal triangle is the mask.
    """

    queries: Tensor
    keys: Tensor
    before: Tensor
    rows: int
    query_length: int
    key_length: int
    plain: bool


@dataclass(frozen=True, slots=True)
class Segments:
    """How a packed sequence falls apart.

    Attributes:
        blocks: the segments, grouped by length.
        scatter: for each position of T, where it lies in the blocks' outputs laid end to end, int64 [T].
        longest: tokens of the longest row.
    """

    blocks: tuple[Block, ...]
    scatter: Tensor
    longest: int


def segments(cu_seqlens: npt.NDArray[np.int32], prefixes: npt.NDArray[np.int64], device: torch.device) -> Segments:
    """Blocks of the segments that `cu_seqlens` [s + 1] delimits; `prefixes` as in `PackedBatch`."""
    import torch

    bounds = cu_seqlens.astype(np.int64)
    starts, lengths = bounds[:-1], np.diff(bounds)
    before = np.where(prefixes >= 0, lengths[prefixes], 0)
    prefix_starts = starts[prefixes]
    totals = before + lengths
    order = np.lexsort((-lengths, -totals))
    scatter = np.empty(int(bounds[-1]), dtype=np.int64)
    blocks: list[Block] = []
    begin, offset = 0, 0
    while begin < len(order):
        rest = order[begin:]
        near = (totals[rest] >= WASTE * totals[rest[0]]) & (2 * lengths[rest] >= lengths[rest[0]])
        near &= lengths[rest] <= 2 * lengths[rest[0]]
        end = begin + (len(rest) if near.all() else int(np.argmin(near)))
        members = order[begin:end]
        width, depth = int(lengths[members].max()), int(totals[members].max())
        steps = np.arange(width, dtype=np.int64)[None, :]
        queries = starts[members, None] + np.minimum(steps, lengths[members, None] - 1)
        places = np.minimum(np.arange(depth, dtype=np.int64)[None, :], totals[members, None] - 1)
        inside = places - before[members, None]
        keys = np.where(inside < 0, prefix_starts[members, None] + places, starts[members, None] + inside)
        real = steps < lengths[members, None]
        scatter[queries[real]] = (offset + np.arange(len(members) * width).reshape(len(members), width))[real]
        flat = [torch.from_numpy(values.reshape(-1)).to(device) for values in (queries, keys, before[members])]
        plain = not bool(before[members].any())
        blocks.append(Block(flat[0], flat[1], flat[2], len(members), width, depth, plain))
        offset += len(members) * width
        begin = end
    return Segments(tuple(blocks), torch.from_numpy(scatter).to(device), int(totals.max()))


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
        rows, width_q, width_k = block.rows, block.query_length, block.key_length
        q = flat[0].index_select(0, block.queries).view(rows, width_q, kv_heads, heads // kv_heads, width)
        k = flat[1].index_select(0, block.keys).view(rows, width_k, kv_heads, width)
        v = flat[2].index_select(0, block.keys).view(rows, width_k, kv_heads, value_width)
        attend = _short if width_k <= SHORT else _long
        out = attend(q.permute(0, 2, 3, 1, 4), k.transpose(1, 2), v.transpose(1, 2), block, scale)
        outputs.append(out.permute(0, 3, 1, 2, 4).reshape(rows * width_q, heads * value_width))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, layout.scatter).view(1, query.shape[2], heads, value_width), None


def _visible(block: Block) -> Tensor:
    """Which key each query sees, bool [r, Q, K]."""
    import torch

    device = block.before.device
    last = block.before[:, None] + torch.arange(block.query_length, device=device)[None, :]
    return torch.arange(block.key_length, device=device)[None, None, :] <= last[:, :, None]


def _short(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Tensor:
    """Plain products: q [r, H_kv, G, Q, D], k and v [r, H_kv, K, D]; returns [r, H_kv, G, Q, D]."""
    import torch

    rows, kv_heads, group, length, width = q.shape
    scores = torch.matmul(q.reshape(rows, kv_heads, group * length, width) * scale, k.transpose(2, 3))
    scores = scores.view(rows, kv_heads, group, length, block.key_length)
    hidden = ~_visible(block)[:, None, None]
    weights = scores.float().masked_fill(hidden, float("-inf")).softmax(-1).to(v.dtype)
    out = torch.matmul(weights.view(rows, kv_heads, group * length, block.key_length), v)
    return out.view(rows, kv_heads, group, length, v.shape[-1])


def _long(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Tensor:
    """The fused kernel on the same shapes; q, k and v are brought to one dtype, which it insists on."""
    import torch

    rows, kv_heads, group, length, width = q.shape
    out = torch.nn.functional.scaled_dot_product_attention(
        q.reshape(rows, kv_heads * group, length, width).to(v.dtype),
        k.repeat_interleave(group, dim=1).to(v.dtype),
        v.repeat_interleave(group, dim=1),
        attn_mask=None if block.plain else _visible(block)[:, None],
        is_causal=block.plain,
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
