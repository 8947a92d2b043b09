"""What an optimizer step saw at every token, taken from numbers that the step has computed anyway.

A probability ratio that drifts, an entropy that collapses or an advantage on the wrong token is seen here and nowhere
else: metrics are means. The lists are as long as the rows, so they are recorded only on the steps that are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainers.collate import BatchArrays
from trainers.losses.policy import log_ratio
from trainers.packing import PackedBatch

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_STATS_SCHEMA = pa.schema(
    [
        pa.field("experience_id", pa.string(), nullable=False),
        pa.field("trained", pa.list_(pa.bool_()), nullable=False),
        pa.field("old_logprobs", pa.list_(pa.float32())),
        pa.field("ratios", pa.list_(pa.float32())),
        pa.field("entropies", pa.list_(pa.float32())),
        pa.field("advantages", pa.list_(pa.float32())),
    ]
)
"""The columns of table `token_stats` that a trainer knows; every list has the length of its row."""


class TokenRecord:
    """Values at the tokens of one batch; filled while the step runs, one micro-batch at a time."""

    def __init__(self, arrays: BatchArrays) -> None:
        """Nothing is known yet of the rows in `arrays`."""
        self._arrays = arrays
        self._columns: dict[str, npt.NDArray[np.float32]] = {}

    def note(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor | None) -> None:
        """Take the values of a micro-batch's trained tokens, [N] each; `logprobs` under the weights before the step."""
        import torch

        behaviour = self._arrays.logprobs[batch.source]
        ratios = log_ratio(logprobs.cpu().float(), torch.from_numpy(behaviour)).exp()
        self._fill("old_logprobs", batch, logprobs.cpu().float().numpy())
        self._fill("ratios", batch, ratios.numpy())
        if entropy is not None:
            self._fill("entropies", batch, entropy.cpu().float().numpy())

    def table(self) -> pa.Table:
        """One row of `TOKEN_STATS_SCHEMA` per row of the batch.

        An element is null off the loss and where nothing was computed (a row whose advantages are all 0 has no
        gradient). A whole list is null where no element is known: ratios of rows that no model sampled, entropies that
        the trainer does not compute, advantages that the algorithm does not use.
        """
        arrays = self._arrays
        advantages = np.where(arrays.trained, arrays.advantages, np.nan).astype(np.float32)
        columns: dict[str, Any] = {"experience_id": arrays.ids, "trained": self._lists(pa.array(arrays.trained))}
        for name in ("old_logprobs", "ratios", "entropies"):
            columns[name] = self._ragged(self._columns.get(name))
        columns["advantages"] = self._ragged(advantages)
        return pa.table([columns[field.name] for field in TOKEN_STATS_SCHEMA], schema=TOKEN_STATS_SCHEMA)

    def _fill(self, name: str, batch: PackedBatch, values: npt.NDArray[np.float32]) -> None:
        if name not in self._columns:
            self._columns[name] = np.full(len(self._arrays.trained), np.nan, dtype=np.float32)
        self._columns[name][batch.source] = values

    def _ragged(self, values: npt.NDArray[np.float32] | None) -> pa.Array:
        if values is None:
            return pa.nulls(len(self._arrays.weights), pa.list_(pa.float32()))
        known = np.isfinite(values)
        return self._lists(pa.array(values, mask=~known), unknown=self._arrays.count(known) == 0)

    def _lists(self, values: pa.Array, *, unknown: npt.NDArray[np.bool_] | None = None) -> pa.ListArray:
        offsets = pa.array(self._arrays.offsets.astype(np.int32))
        return pa.ListArray.from_arrays(offsets, values, mask=None if unknown is None else pa.array(unknown))
