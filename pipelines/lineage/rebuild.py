"""A training batch again: the very rows that the trainer got, from its manifest, whatever has happened since."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.store.base import ExperienceStore
from pipelines.batches import assemble_batch
from pipelines.lineage.finding import find_batch
from trainers.base import TrainBatch


@dataclass(frozen=True, slots=True)
class RebuiltBatch:
    """A batch as the trainer gets it.

    Attributes:
        run_id: run that trained it.
        batch: the trainer's rows.
        digests: column → digest of its values; equal values give equal digests, however they lie in memory.
        digest: of all columns together.
    """

    run_id: str
    batch: TrainBatch
    digests: dict[str, str]
    digest: str


def rebuild_batch(store: ExperienceStore, *, step: int, run_id: str | None = None) -> RebuiltBatch:
    """The rows of an optimizer step, assembled as they were for its training.

    Raises:
        UsageError: no batch has this step, or several runs have one and none is named.
    """
    found = find_batch(store, step=step, run_id=run_id)
    batch = assemble_batch(store, found.batch, found.rows)
    digests = {name: column_digest(batch.rows.column(name)) for name in batch.rows.column_names}
    return RebuiltBatch(found.run_id, batch, digests, rows_digest(batch.rows))


def rows_digest(rows: pa.Table) -> str:
    """Digest of a table's columns, their names and types, and their values in order."""
    whole = hashlib.blake2b(digest_size=16)
    for name in rows.column_names:
        whole.update(f"{name}: {type_text(rows.schema.field(name).type)} {column_digest(rows.column(name))}\n".encode())
    return whole.hexdigest()


def type_text(kind: pa.DataType) -> str:
    """A type by what it holds; what the elements of a list are called differs between file formats."""
    return f"list of {type_text(kind.value_type)}" if pa.types.is_list(kind) else str(kind)


def column_digest(column: pa.ChunkedArray) -> str:
    """Digest of the values of a column, bit for bit; neither chunks nor what lies under a null enters it."""
    state = hashlib.blake2b(digest_size=16)
    for part in _parts(pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)):
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


def _parts(values: pa.Array) -> list[bytes]:
    """Which values are there, how long lists and texts are, and the values themselves."""
    present = np.asarray(values.is_valid().to_numpy(zero_copy_only=False), dtype=np.uint8).tobytes()
    if pa.types.is_list(values.type):
        lengths = np.asarray(pc.fill_null(pc.list_value_length(values), 0), dtype=np.int64).tobytes()
        return [present, lengths, *_parts(pc.list_flatten(values))]
    if pa.types.is_string(values.type):
        filled = [text.encode("utf-8", "surrogatepass") for text in pc.fill_null(values, "").to_pylist()]
        return [present, np.array([len(text) for text in filled], np.int64).tobytes(), b"".join(filled)]
    filler = pa.scalar(False if pa.types.is_boolean(values.type) else 0, values.type)
    return [present, pc.fill_null(values, filler).to_numpy(zero_copy_only=False).tobytes()]
