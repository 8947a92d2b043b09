"""Rows that several processes read: one Arrow file each, and narrow rows that are made from one block of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa


def write(path: Path, rows: pa.Table) -> Path:
    """Write an Arrow file of one record batch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
        writer.write_table(rows.combine_chunks())
    return path


def read(path: Path) -> pa.Table:
    """The rows in this process's own memory, as a program has them that made them."""
    return pa.ipc.open_file(pa.py_buffer(path.read_bytes())).read_all()


def renamed(block: pa.Table, first: int) -> pa.Table:
    """The block as rows `first`, `first + 1`, …: other keys, groups and versions, the same payload."""
    number = np.arange(first, first + block.num_rows)
    columns = {
        "experience_id": pa.array(narrow_ids(number)),
        "group_id": pa.array([f"h{one:08d}" for one in (number // 8).tolist()]),
        "explore_step": pa.array(number // 512),
        "model_version": pa.array(number // 4096),
    }
    for name, values in columns.items():
        at = block.schema.get_field_index(name)
        block = block.set_column(at, block.schema.field(at), values)
    return block


def narrow_ids(numbers: np.ndarray) -> list[str]:
    """Ids of rows made by `renamed`."""
    return [f"n{one:010d}" for one in numbers.tolist()]
