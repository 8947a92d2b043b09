"""Training batches: from reserved rows to a manifest, and from a manifest to the trainer's rows.

The trainer always gets what the manifest says. A first training and a replay after a crash therefore go through the
same function, and `rebuild` needs nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.errors import TrainingError
from buffer_engine.schema import BATCH_ROWS, BATCHES, DECISIONS
from buffer_engine.store.base import ExperienceStore, ReadPolicy, Reservation
from operators.frame import current_reward
from pipelines.clock import code_commit, now
from pipelines.retention import refuse_erased
from pipelines.token_masks import MASK_COLUMNS, list_offsets, masked_rows, oldest_trained, train_masks
from trainers.advantages import compute_advantages
from trainers.algorithms.base import Algorithm
from trainers.base import BATCH_SCHEMA, TrainBatch

PAYLOAD = (
    "experience_id",
    "group_id",
    "made_by",
    "token_ids",
    "loss_mask",
    "logprobs",
    "token_versions",
    "model_version",
    "error",
)


@dataclass(frozen=True, slots=True)
class Manifest:
    """One batch before its step: the `batches` row, its `batch_rows`, and rows that cannot be used.

    Attributes:
        unusable: decisions that reject reserved rows without a reward; None when all rows have one.
        counts: oddities of the advantages (singleton, zero_variance) and of the rewards (no_reward).
    """

    batch: pa.Table
    rows: pa.Table
    unusable: pa.Table | None
    counts: Mapping[str, int]


def build_manifest(
    store: ExperienceStore,
    reservation: Reservation,
    *,
    step: int,
    algorithm: Algorithm[Any],
    policy: ReadPolicy,
    config_hash: str,
    seed: int,
    reward_penalties: Callable[[TrainBatch], pa.Array] | None = None,
) -> Manifest:
    """Decide rewards, advantages and weights of the reserved rows.

    Advantages are computed over the reserved rows of each group, which are those that every operator kept.

    Args:
        reward_penalties: gives what a KL term in the reward takes off each row (see `TorchTrainer.kl_penalties`); the
            manifest's `reward` stays the stored one, its advantages are those of the penalised rewards.
    """
    ids = list(reservation.experience_ids)
    payload = store.fetch(ids, columns=["experience_id", "group_id", "made_by", "error"])
    rewards = current_reward(store.narrow("scores", ids))
    frame = _frame(payload).join(rewards, on="experience_id", how="left", maintain_order="left")
    frame = frame.with_columns(
        pl.when(pl.col("error").is_null()).then(pl.col("reward")).alias("reward"),
        pl.col("score_versions_json").fill_null("{}"),
    )
    unusable: pa.Table | None = None
    counts: dict[str, int] = {}
    if algorithm.needs.reward:
        missing = frame.filter(pl.col("reward").is_null())
        if missing.height:
            counts["no_reward"] = missing.height
            unusable = _rejections(missing["experience_id"].to_list(), reservation.run_id, reservation.batch_id)
            frame = frame.filter(pl.col("reward").is_not_null())
    masked = masked_rows(store, frame["experience_id"].to_list())
    frame = frame.with_columns(masked=pl.col("experience_id").is_in(sorted(masked)))
    weights = [reservation.weight_of()[row] for row in frame["experience_id"].to_list()]
    rows = _batch_rows(reservation.batch_id, frame, pl.Series([None] * frame.height, dtype=pl.Float64), weights)
    reader = policy.model_dump(mode="json")
    limit = oldest_trained(reader, reservation.model_version)
    lengths = _trained_tokens(store, frame.filter(~pl.col("masked"))["experience_id"].to_list(), limit)
    batch = pa.table(
        {
            "batch_id": [reservation.batch_id],
            "run_id": [reservation.run_id],
            "step": [step],
            "model_version": [reservation.model_version],
            "algorithm": [algorithm.config.type],
            "rows": [frame.height],
            "trained_tokens": [lengths],
            "config_hash": [config_hash],
            "code_commit": [code_commit()],
            "reader_json": [json.dumps(reader, sort_keys=True)],
            "rng_json": [json.dumps({"seed": seed, "step": step})],
            "created_at": [now()],
        },
        schema=BATCHES.schema,
    )
    if algorithm.needs.advantages and frame.height:
        shaped = frame.select("experience_id", "group_id", "reward", "error")
        if reward_penalties is not None and algorithm.needs.reward_penalty:
            penalties = pl.Series(reward_penalties(assemble_batch(store, batch, rows)).to_numpy(zero_copy_only=False))
            shaped = shaped.with_columns(pl.col("reward") - penalties)
        result = compute_advantages(algorithm.config.advantage, shaped)
        rows = _batch_rows(reservation.batch_id, frame, result.advantages, weights)
        counts.update(result.counts)
    return Manifest(batch, rows, unusable, counts)


def assemble_batch(store: ExperienceStore, batch: pa.Table, rows: pa.Table) -> TrainBatch:
    """The trainer's rows of a stored manifest (one `batches` row and its `batch_rows`), in manifest order.

    Everything that can change later (rewards, advantages, masks) is read from the manifest, so the same manifest gives
    the same rows whenever it is asked for. Rows that the manifest calls masked keep their place and train on no token;
    with `over_age: mask` the tokens that are too old for the manifest's weights do not train either.

    Raises:
        TrainingError: the manifest names no rows, or the payload of some was erased; names them.
    """
    rows = rows.sort_by("position")
    ids = rows.column("experience_id").to_pylist()
    if not ids:
        raise TrainingError(f"batch {batch.column('batch_id')[0]} has no rows")
    payload = store.fetch(ids, columns=list(PAYLOAD))
    if pc.min(pc.list_value_length(payload.column("token_ids"))).as_py() == 0:
        refuse_erased(store, ids, doing=f"batch {batch.column('batch_id')[0]}")
    masked = pc.fill_null(rows.column("masked"), False).to_numpy().astype(bool)
    reader = json.loads(batch.column("reader_json")[0].as_py())
    limit = oldest_trained(reader, batch.column("model_version")[0].as_py())
    loss_mask = train_masks(payload, masked, limit)
    table = pa.table(
        {
            "experience_id": payload.column("experience_id"),
            "group_id": payload.column("group_id"),
            "kind": rows.column("kind"),
            "token_ids": payload.column("token_ids"),
            "loss_mask": loss_mask,
            "logprobs": payload.column("logprobs"),
            "advantages": _token_advantages(rows.column("advantage"), loss_mask),
            "reward": rows.column("reward"),
            "weight": rows.column("weight"),
            "model_version": payload.column("model_version"),
        },
        schema=BATCH_SCHEMA,
    )
    return TrainBatch(
        batch_id=batch.column("batch_id")[0].as_py(),
        step=batch.column("step")[0].as_py(),
        model_version=batch.column("model_version")[0].as_py(),
        rows=table,
    )


def stored_manifest(store: ExperienceStore, batch_id: str) -> tuple[pa.Table, pa.Table]:
    """The `batches` row and the `batch_rows` of a prepared or committed batch; both empty when there is none."""
    return store.narrow("batches", [batch_id]), store.narrow("batch_rows", [batch_id])


def _frame(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def _batch_rows(batch_id: str, frame: pl.DataFrame, advantages: pl.Series, weights: list[float]) -> pa.Table:
    return pa.table(
        {
            "batch_id": [batch_id] * frame.height,
            "position": np.arange(frame.height, dtype=np.int32),
            "experience_id": frame["experience_id"].to_list(),
            "group_id": frame["group_id"].to_list(),
            "reward": frame["reward"].to_list(),
            "advantage": advantages.to_list(),
            "weight": weights,
            "kind": ["expert" if made_by == "import" else "rollout" for made_by in frame["made_by"].to_list()],
            "score_versions_json": frame["score_versions_json"].to_list(),
            "masked": frame["masked"].to_list(),
        },
        schema=BATCH_ROWS.schema,
    )


def _trained_tokens(store: ExperienceStore, ids: list[str], limit: int | None) -> int:
    """Tokens that rows train on: the batch's token denominator."""
    payload = store.fetch(ids, columns=list(MASK_COLUMNS))
    masks = train_masks(payload, np.zeros(len(ids), dtype=bool), limit)
    return int(masks.flatten().to_numpy(zero_copy_only=False).astype(np.int64).sum())


def _rejections(ids: list[str], run_id: str, batch_id: str) -> pa.Table:
    return pa.table(
        {
            "experience_id": ids,
            "verdict": ["reject"] * len(ids),
            "operator": ["reader"] * len(ids),
            "position": pa.nulls(len(ids), pa.int32()),
            "reason": ["no_reward"] * len(ids),
            "detail": ["the algorithm needs a reward and this row has none"] * len(ids),
            "ref_id": pa.nulls(len(ids), pa.string()),
            "pass_id": [batch_id] * len(ids),
            "run_id": [run_id] * len(ids),
            "decided_at": [now()] * len(ids),
        },
        schema=DECISIONS.schema,
    )


def _token_advantages(column: pa.ChunkedArray, loss_mask: pa.ListArray) -> pa.Array:
    """Row advantages spread over the unmasked tokens; null rows stay null."""
    values = column.to_numpy(zero_copy_only=False).astype(np.float64)
    if np.isnan(values).all():
        return pa.nulls(len(loss_mask), pa.list_(pa.float64()))
    lengths = np.asarray(loss_mask.value_lengths())
    flat_mask = loss_mask.flatten().to_numpy(zero_copy_only=False).astype(bool)
    flat = np.where(flat_mask, np.repeat(np.nan_to_num(values), lengths), 0.0)
    return pa.ListArray.from_arrays(list_offsets(lengths), pa.array(flat))
