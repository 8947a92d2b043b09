"""Forming a batch: reserve rows, decide the manifest, write it; or say why there is nothing to train on."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.errors import StarvedError
from buffer_engine.store.base import ExperienceStore, ReadPolicy
from pipelines.assemble import Assembly
from pipelines.batches import build_manifest
from pipelines.curate import reject_counts
from pipelines.cursors import RunCursors
from pipelines.rows import event_row
from trainers.algorithms.base import Algorithm


def reserve_batch(
    assembly: Assembly,
    algorithm: Algorithm[Any],
    read: ReadPolicy,
    *,
    step: int,
    batch_id: str,
    model_version: int,
) -> tuple[pa.Table, pa.Table] | None:
    """Reserve the next rows and write their manifest; None when fewer than `read.min_rows` can train.

    Returns:
        The `batches` row and the `batch_rows`, as stored.
    """
    store = assembly.store
    read = read.seeded(assembly.spec.seed)
    reservation = store.reserve(read, run_id=assembly.run_id, batch_id=batch_id, model_version=model_version)
    if reservation is None:
        return None
    manifest = build_manifest(
        store,
        reservation,
        step=step,
        algorithm=algorithm,
        policy=read,
        config_hash=assembly.config_hash,
        seed=assembly.spec.seed,
        reward_penalties=getattr(assembly.trainer, "kl_penalties", None),
    )
    if manifest.unusable is not None:
        store.append("decisions", manifest.unusable)
    if manifest.rows.num_rows < read.min_rows:
        store.release(batch_id)
        return None
    store.prepare_batch(reservation, step=step, batch=manifest.batch, rows=manifest.rows)
    for kind, count in manifest.counts.items():
        if count:
            store.append("events", event_row(assembly.run_id, step, kind, count, f"batch {batch_id}"))
    return manifest.batch, manifest.rows


def starve(assembly: Assembly, read: ReadPolicy, *, step: int, explorations: int) -> None:
    """Record that a step has too few rows and is skipped, or stop, as `loop.on_starved` says.

    Raises:
        StarvedError: with the counts per operator and reason.
    """
    made = len(_training_rows(assembly.store, assembly.run_id, step))
    said = (
        f"step {step} found fewer than {read.min_rows} rows to train on after {explorations} explorations, which made "
        f"{made} rows. Rejected or held in this step: {listed_rejects(assembly.store, assembly.run_id, step)}."
    )
    if assembly.spec.loop.on_starved == "error":
        raise StarvedError(
            f"{said} Loosen these operators, raise loop.max_refills or set loop.on_starved: skip, then "
            f"`buffer-engine resume {assembly.folder} --set …`"
        )
    assembly.store.append_all(
        {"events": event_row(assembly.run_id, step, "starved_step", 1, said)},
        cursors={RunCursors(assembly.run_id).skipped(step): 1},
    )


def listed_rejects(store: ExperienceStore, run_id: str, step: int | None = None) -> str:
    """`operator: reason rows; …` over the run's training rows (of one step), most first."""
    ids = _training_rows(store, run_id, step)
    if not ids:
        return "no row was made"
    counts = reject_counts(store, ids)
    return (
        "; ".join(f"{operator}: {reason} {count}" for operator, reason, count in counts) or f"none of {len(ids)} rows"
    )


def _training_rows(store: ExperienceStore, run_id: str, step: int | None) -> list[str]:
    """Ids of the run's training rows; those that one step explored, or that operators made of them."""
    rows = store.table("rollouts", columns=["experience_id", "run_id", "explore_step", "partition"])
    chosen = pc.and_(pc.equal(rows.column("run_id"), run_id), pc.equal(rows.column("partition"), "train"))
    if step is not None:
        chosen = pc.and_(chosen, pc.equal(rows.column("explore_step"), step))
    return rows.filter(chosen).column("experience_id").to_pylist()
