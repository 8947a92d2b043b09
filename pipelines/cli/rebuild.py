"""`buffer-engine rebuild`: the rows of a training batch, exactly as the trainer got them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from buffer_engine.errors import StoreError, UsageError
from buffer_engine.store.opening import open_store
from pipelines.cli.console import print_text, results
from pipelines.cli.opening import require_store
from pipelines.cli.rendering import result_table
from pipelines.lineage.rebuild import RebuiltBatch, rebuild_batch, type_text


def rebuild(
    store: Annotated[Path, typer.Argument(help="folder of the store")],
    batch: Annotated[int, typer.Option("--batch", help="optimizer step whose batch to rebuild")],
    run: Annotated[
        str | None, typer.Option("--run", help="run of the batch; needed when the store has several")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the rows to this Parquet file")] = None,
) -> None:
    """Give a training batch again: token ids, masks, log-probs, rewards, advantages and weights of every row.

    What was scored, decided or trained since changes nothing in it; the digest says whether two are the same.
    """
    if output is not None and output.suffix != ".parquet":
        raise UsageError(f"--output {output}: the rows are written as Parquet; name a file that ends in .parquet")
    with open_store(require_store(store), read_only=True) as opened:
        rebuilt = rebuild_batch(opened, step=batch, run_id=run)
        if output is not None:
            _write(rebuilt, output)
    rows = rebuilt.batch.rows
    print_text(
        f"batch {rebuilt.batch.batch_id}: step {rebuilt.batch.step} of run {rebuilt.run_id}, "
        f"weights {rebuilt.batch.model_version}, {rows.num_rows} rows\n"
    )
    cells = [[name, type_text(rows.schema.field(name).type), digest] for name, digest in rebuilt.digests.items()]
    results.print(result_table(["column", "type", "digest"], cells, [False, False, False]))
    print_text(f"\ndigest {rebuilt.digest}")
    if output is not None:
        print_text(f"written to {output}")


def _write(rebuilt: RebuiltBatch, output: Path) -> None:
    """Write the file whole or not at all; where the rows come from stands in its metadata."""
    import pyarrow.parquet as pq

    about = {
        "batch_id": rebuilt.batch.batch_id,
        "run_id": rebuilt.run_id,
        "step": str(rebuilt.batch.step),
        "model_version": str(rebuilt.batch.model_version),
        "digest": rebuilt.digest,
    }
    table = rebuilt.batch.rows.replace_schema_metadata({**(rebuilt.batch.rows.schema.metadata or {}), **about})
    draft = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        pq.write_table(table, draft, compression="zstd")
        os.replace(draft, output)
    except OSError as error:
        raise StoreError(f"{output}: cannot be written ({error.strerror or error})") from error
    finally:
        draft.unlink(missing_ok=True)
