"""Which stored batch a step number means, and what was known when its manifest was written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.errors import UsageError
from buffer_engine.store.base import ExperienceStore
from pipelines.batches import stored_manifest
from pipelines.load import hash_of, load_spec, plain
from pipelines.runs import saved_hash, specification_path
from pipelines.spec import Spec


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A prepared or committed batch.

    Attributes:
        batch: its `batches` row.
        rows: its `batch_rows`, by position.
    """

    batch_id: str
    run_id: str
    step: int
    batch: pa.Table
    rows: pa.Table


def find_batch(store: ExperienceStore, *, step: int, run_id: str | None = None) -> StoredBatch:
    """The batch of an optimizer step that was trained, or is about to be.

    Raises:
        UsageError: no batch has this step, or several runs have one and none is named.
    """
    state = store.batch_state().to_pylist()
    known = [row for row in state if row["status"] in ("prepared", "committed")]
    chosen = [row for row in known if row["step"] == step and run_id in (None, row["run_id"])]
    runs = sorted({row["run_id"] for row in chosen})
    if len(runs) > 1:
        raise UsageError(f"step {step} exists in several runs: {', '.join(runs)}; choose one with --run")
    if not chosen:
        of_run = "" if run_id is None else f" of run {run_id!r}"
        steps: dict[str, list[int]] = {}
        for row in known:
            steps.setdefault(row["run_id"], []).append(row["step"])
        listing = "; ".join(f"{name}: steps {min(has)} to {max(has)}" for name, has in sorted(steps.items()))
        raise UsageError(f"no batch{of_run} has step {step}; there " + (f"are {listing}" if listing else "is none"))
    batch, rows = stored_manifest(store, chosen[0]["batch_id"])
    return StoredBatch(chosen[0]["batch_id"], runs[0], step, batch, rows.sort_by("position"))


def version_of_manifest(store: ExperienceStore, batch_id: str) -> int:
    """The version that made the batch's manifest visible: what was decided or scored later was not known to it."""
    low, high = 1, store.version()
    while low < high:
        middle = (low + high) // 2
        names = store.table("batches", until=middle, columns=["batch_id"]).column("batch_id")
        if pc.any(pc.equal(names, batch_id)).as_py():
            high = middle
        else:
            low = middle + 1
    return low


def specification_of(folder: Path, found: StoredBatch) -> Spec:
    """The specification under which a batch was made; a run that was resumed with `--set` has several.

    Raises:
        UsageError: it is not beside the store any more.
    """
    wanted: str = found.batch.column("config_hash")[0].as_py()
    current = specification_path(folder, found.run_id)
    kept = current.with_name(f"{found.run_id}.{wanted[:12]}.yaml.old")
    file = current if saved_hash(folder, found.run_id) == wanted else kept
    if not file.exists():
        raise UsageError(
            f"{current.parent}: the specification of batch {found.batch_id} (configuration {wanted}) is not there; "
            "what-if needs its algorithm: put the file back"
        )
    spec = load_spec(file).spec
    if hash_of(plain(spec)) != wanted:
        raise UsageError(f"{file}: it was changed since the batch was made (its configuration is not {wanted})")
    return spec
