"""From token losses to one number: numerators here, denominators of the whole batch from outside.

A micro-batch contributes its share of the batch's loss, so the sum over micro-batches is the same for every split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


def aggregate(
    values: Tensor,
    mask: Tensor,
    row: Tensor,
    row_tokens: Tensor,
    *,
    how: Aggregation,
    tokens: int,
    rows: int,
    norm: float | None = None,
) -> Tensor:
    """This micro-batch's share of the batch's aggregate of `values`; a scalar.

    Args:
        values: token losses, [N]; masked ones may be anything, also NaN.
        mask: bool [N]; false contributes nothing.
        row: row of each token within the micro-batch, int64 [N].
        row_tokens: unmasked tokens of each row of the micro-batch, [R] (rows are never split).
        how: token_mean Σ/tokens; seq_mean_token_sum Σ/rows; seq_mean_token_mean Σ(row mean)/rows;
            seq_mean_token_sum_norm Σ/(rows·norm).
        tokens, rows: unmasked tokens, and rows with at least one, of the whole batch.
        norm: the constant of seq_mean_token_sum_norm.

    Raises:
        ValueError: `norm` is missing where it is needed, or `how` is unknown.
    """
    import torch

    values = torch.where(mask, values, torch.zeros_like(values))
    match how:
        case "token_mean":
            return values.sum() / tokens
        case "seq_mean_token_sum":
            return values.sum() / rows
        case "seq_mean_token_mean":
            return (values / row_tokens.to(values.dtype).clamp(min=1)[row]).sum() / rows
        case "seq_mean_token_sum_norm":
            if norm is None:
                raise ValueError("seq_mean_token_sum_norm needs `norm`, the constant number of tokens")
            return values.sum() / (rows * norm)
    raise ValueError(f"unknown aggregation {how!r}")
