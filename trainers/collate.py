"""From a batch's Arrow rows to flat numpy arrays: offsets and values of the list columns, no row objects.

Whatever a later stage would trip over is refused here, with the row's id: unequal lengths, a trained token without
the log-prob or advantage that the algorithm needs, numbers that are not finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.errors import SchemaError
from trainers.algorithms.base import Needs
from trainers.base import BATCH_SCHEMA


@dataclass(frozen=True, slots=True)
class BatchArrays:
    """A batch of R rows and S tokens, flat. Row r owns tokens offsets[r] … offsets[r + 1] − 1.

    Attributes:
        ids: experience ids, [R].
        offsets: int64 [R + 1].
        token_ids: int64 [S].
        trained: bool [S]: the loss mask, without the first token of a row (nothing predicts it).
        logprobs: float32 [S], nats; NaN where nothing was sampled.
        advantages: float64 [S]; NaN where the row has none.
        weights: float64 [R].
        model_versions: int64 [R]; −1 where no model sampled the row.
    """

    ids: pa.Array
    offsets: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]
    model_versions: npt.NDArray[np.int64]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row, [R]."""
        return np.diff(self.offsets)

    @property
    def row_of_token(self) -> npt.NDArray[np.int64]:
        """Row of each token, [S]."""
        return np.repeat(np.arange(len(self.weights), dtype=np.int64), self.lengths)

    @property
    def trained_tokens(self) -> npt.NDArray[np.int64]:
        """Trained tokens of each row, [R]."""
        return self.count(self.trained)

    def count(self, flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """True elements of `flags` [S] in each row, [R]."""
        running = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
        return running[self.offsets[1:]] - running[self.offsets[:-1]]

    def name(self, row: int) -> str:
        """How messages call row `row`."""
        return f"row {self.ids[row].as_py()!r}"


def collate(rows: pa.Table, needs: Needs | None = None) -> BatchArrays:
    """Flat arrays of `rows`; a column in one chunk without nulls is not copied.

    Args:
        rows: `BATCH_SCHEMA`; the columns that may be null may be missing.
        needs: check that trained tokens have the log-probs and advantages the algorithm needs; None: no check.

    Raises:
        SchemaError: a column is missing or has another type, the batch is empty, lists of a row differ in length, or
            a trained token lacks what `needs` names (null, NaN, infinite); names the row and the column.
    """
    _check_columns(rows)
    offsets, tokens = _lists(rows, "token_ids")
    if tokens.null_count:
        raise SchemaError(f"batch: column 'token_ids' has {tokens.null_count} null elements; every token has an id")
    ids = _column(rows, "experience_id")
    mask = _aligned(rows, "loss_mask", offsets, ids, fill=False, dtype=np.bool_)
    first = offsets[:-1][np.diff(offsets) > 0]
    trained = mask.copy()
    trained[first] = False
    versions = np.full(len(rows), -1, dtype=np.int64)
    if "model_version" in rows.column_names:
        versions = pc.fill_null(_column(rows, "model_version"), -1).to_numpy(zero_copy_only=False)
    arrays = BatchArrays(
        ids=ids,
        offsets=offsets,
        token_ids=tokens.to_numpy(zero_copy_only=False).astype(np.int64),
        trained=trained,
        logprobs=_aligned(rows, "logprobs", offsets, ids, fill=np.nan, dtype=np.float32),
        advantages=_aligned(rows, "advantages", offsets, ids, fill=np.nan, dtype=np.float64),
        weights=_column(rows, "weight").to_numpy(zero_copy_only=False),
        model_versions=versions,
    )
    if not np.isfinite(arrays.weights).all():
        row = int(np.flatnonzero(~np.isfinite(arrays.weights))[0])
        raise SchemaError(f"batch: {arrays.name(row)} has weight {arrays.weights[row]}, not a finite number")
    if needs is not None and needs.logprobs:
        _check_trained(arrays, arrays.logprobs, "logprobs", "a row that no model sampled cannot feed this algorithm")
    if needs is not None and needs.advantages:
        _check_trained(arrays, arrays.advantages, "advantages", "leave rows without a reward out of the batch")
    return arrays


def _check_columns(rows: pa.Table) -> None:
    for wanted in BATCH_SCHEMA:
        if wanted.name not in rows.column_names:
            if wanted.nullable:
                continue
            raise SchemaError(f"batch: column {wanted.name!r} is missing; it needs {BATCH_SCHEMA.names}")
        column = rows.column(wanted.name)
        if column.type != wanted.type and not (wanted.nullable and pa.types.is_null(column.type)):
            raise SchemaError(f"batch: column {wanted.name!r} is {column.type}, expected {wanted.type}")
        if not wanted.nullable and column.null_count:
            raise SchemaError(f"batch: column {wanted.name!r} has {column.null_count} nulls and may have none")
    if len(rows) == 0:
        raise SchemaError("batch: it has no rows")


def _column(rows: pa.Table, name: str) -> Any:
    """The column as one array; only a column in several chunks is copied."""
    column = rows.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _lists(rows: pa.Table, name: str) -> tuple[npt.NDArray[np.int64], Any]:
    """Offsets from 0 (a null list is empty) and the values they point into."""
    column = _column(rows, name)
    lengths = pc.fill_null(column.value_lengths(), 0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(column) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets, column.flatten()


def _aligned(
    rows: pa.Table, name: str, offsets: npt.NDArray[np.int64], ids: pa.Array, *, fill: Any, dtype: Any
) -> npt.NDArray[Any]:
    """A per-token column spread over the batch's tokens; `fill` in rows where it is null, NaN at null elements."""
    total = int(offsets[-1])
    if name not in rows.column_names or rows.column(name).null_count == len(rows):
        return np.full(total, fill, dtype=dtype)
    column = _column(rows, name)
    own, values = _lists(rows, name)
    present = column.is_valid().to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(present & (np.diff(own) != np.diff(offsets)))
    if len(wrong):
        row = int(wrong[0])
        raise SchemaError(
            f"batch: row {ids[row].as_py()!r} has {np.diff(own)[row]} values in {name!r} "
            f"and {np.diff(offsets)[row]} in 'token_ids'; they must be equal"
        )
    if dtype == np.bool_ and values.null_count:
        raise SchemaError(f"batch: column {name!r} has {values.null_count} null elements; a mask is true or false")
    flat = values.to_numpy(zero_copy_only=False)
    if present.all():
        return flat.astype(dtype, copy=False)
    spread = np.full(total, fill, dtype=dtype)
    spread[np.repeat(present, np.diff(offsets))] = flat
    return spread


def _check_trained(arrays: BatchArrays, values: npt.NDArray[Any], name: str, advice: str) -> None:
    bad = np.flatnonzero(arrays.trained & ~np.isfinite(values))
    if len(bad):
        row = int(arrays.row_of_token[bad[0]])
        raise SchemaError(
            f"batch: {arrays.name(row)} has no finite {name!r} at trained token {bad[0] - arrays.offsets[row]} "
            f"({len(bad)} such tokens in the batch): {advice}, or mask the token"
        )
