"""Which tokens of a batch's rows train: the stored mask less what operators and the reader switched off.

An operator's `mask` decision takes a whole row out of the loss; the manifest notes the ones known when it was written.
The reader's, made where `over_age: mask` lets a row in that was partly sampled by weights too old, takes out the
over-age tokens only. Both follow from the manifest alone, so a replay masks the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.errors import TrainingError
from buffer_engine.store.base import ExperienceStore

MASK_COLUMNS = ("experience_id", "loss_mask", "logprobs", "token_versions")

_Flags = np.ndarray[Any, np.dtype[np.bool_]]


def oldest_trained(reader: Mapping[str, Any], model_version: int) -> int | None:
    """Oldest weight version whose tokens train, by the read policy of a manifest; None: all of them."""
    if reader.get("over_age") != "mask" or reader.get("max_staleness") is None:
        return None
    return model_version - int(reader["max_staleness"])


def train_masks(rows: pa.Table, masked: _Flags, oldest: int | None) -> pa.ListArray:
    """The mask of each row, per token: whether it trains.

    Args:
        rows: rollouts with `MASK_COLUMNS`.
        masked: per row, whether it is out of the loss as a whole (the manifest's column `masked`).
        oldest: tokens sampled by weights before this version are off; None: age does not matter.

    Raises:
        TrainingError: a row's token versions do not cover its sampled tokens; names it.
    """
    ids: list[str] = rows.column("experience_id").to_pylist()
    mask = one_list(rows.column("loss_mask"))
    lengths = np.asarray(mask.value_lengths())
    flat = mask.flatten().to_numpy(zero_copy_only=False).astype(bool)
    flat &= ~np.repeat(masked, lengths)
    if oldest is not None:
        flat &= _young(rows, ids, lengths, oldest)
    return pa.ListArray.from_arrays(list_offsets(lengths), pa.array(flat))


def masked_rows(store: ExperienceStore, ids: list[str]) -> set[str]:
    """Those of the rows that a `mask` decision takes out of the loss as a whole, as far as is known now."""
    decisions = store.narrow("decisions", ids)
    chosen = pc.and_(
        pc.equal(decisions.column("verdict"), "mask"),
        pc.or_(
            pc.not_equal(decisions.column("operator"), "reader"), pc.not_equal(decisions.column("reason"), "over_age")
        ),
    )
    return set(decisions.filter(chosen).column("experience_id").to_pylist())


def one_list(column: pa.ChunkedArray) -> pa.ListArray:
    """A list column as one array."""
    chunks = column.combine_chunks()
    return chunks if isinstance(chunks, pa.ListArray) else pa.concat_arrays(chunks.chunks)


def list_offsets(lengths: np.ndarray[Any, Any]) -> pa.Array:
    """Offsets of lists of these lengths."""
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _young(rows: pa.Table, ids: list[str], lengths: np.ndarray[Any, Any], oldest: int) -> _Flags:
    """Per token of all rows: false where weights before `oldest` sampled it."""
    flags: list[_Flags] = []
    columns = (ids, lengths.tolist(), rows.column("logprobs"), rows.column("token_versions").to_pylist())
    for one, length, logprobs, versions in zip(*columns, strict=True):
        young = np.ones(length, dtype=bool)
        if versions and logprobs.is_valid and min(run["version"] for run in versions) < oldest:
            sampled = np.flatnonzero(logprobs.values.is_valid().to_numpy(zero_copy_only=False))
            runs = [run["length"] for run in versions]
            if sum(runs) != len(sampled):
                raise TrainingError(
                    f"row {one!r} has {len(sampled)} sampled tokens and token versions of {sum(runs)}: which of them "
                    "are over-age is unknown; read with over_age: reject"
                )
            young[sampled] = np.repeat([run["version"] >= oldest for run in versions], runs)
        flags.append(young)
    return np.concatenate(flags) if flags else np.zeros(0, dtype=bool)
