"""What a peer of the store must be able to do here, and which peers there are.

Each peer stores the same Arrow rows in the way that suits it best; a score is a row of its own in every one of them,
so none has to rewrite a rollout to be scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from buffer_engine.store.buffers import elements_of, valid_of, values_of

PAYLOAD = ("token_ids", "loss_mask", "logprobs")
Padded = dict[str, npt.NDArray[np.generic]]


class Unsupported(Exception):
    """The peer has no such operation; the text goes into the table."""


class Peer(Protocol):
    """One opened storage; the process that opens it may be one of several."""

    def append(self, rows: pa.Table) -> None:
        """Store rollouts, as durably as the peer can."""
        ...

    def batch(self, ids: list[str]) -> Padded:
        """These rollouts as padded arrays of shape [rows, longest], one for each of `PAYLOAD`."""
        ...

    def score(self, scores: pa.Table) -> None:
        """Store one late score for each of many rollouts."""
        ...

    def group_by(self) -> list[tuple[object, ...]]:
        """(model_version, stop_reason, rows, mean prompt_length), by SQL where the peer has it."""
        ...

    def count(self) -> int:
        """How many rollouts another process sees now, found as cheaply as the peer allows."""
        ...

    def ids(self) -> list[str]:
        """Ids of all stored rollouts, repeats included."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


@dataclass(frozen=True, slots=True)
class PeerKind:
    """A peer by name.

    Attributes:
        syncs: what an append waits for, in words: the one thing that makes durable numbers comparable.
        needs: modules that must be importable.
        install: the command that brings them.
        shared: several processes may have it open.
    """

    name: str
    title: str
    target: str
    syncs: str
    needs: tuple[str, ...] = ()
    install: str = ""
    shared: bool = True

    def missing(self) -> str | None:
        """`not installed: pip install …`, or None where it can be used."""
        absent = [module for module in self.needs if find_spec(module) is None]
        return f"not installed: {self.install}" if absent else None

    def open(self, folder: Path) -> Peer:
        """Open the peer's storage in `folder`, made where it is missing."""
        module, _, name = self.target.partition(":")
        folder.mkdir(parents=True, exist_ok=True)
        peer: Peer = getattr(import_module(f"benchmarks.store.{module}"), name)(folder)
        return peer


KINDS = {
    kind.name: kind
    for kind in (
        PeerKind("ours", "buffer-engine", "peer_ours:Ours", "fdatasync + SQLite FULL"),
        PeerKind("ours-process", "buffer-engine, durability process", "peer_ours:OursProcess", "no (survives SIGKILL)"),
        PeerKind("parquet", "Parquet files (zstd)", "peer_parquet:ParquetFiles", "fsync file + folder"),
        PeerKind("duckdb", "DuckDB file", "peer_duckdb:DuckDBFile", "fsync of its log", shared=False),
        PeerKind("sqlite", "SQLite blobs", "peer_sqlite:SQLiteBlobs", "SQLite FULL"),
        PeerKind("lance", "Lance", "peer_lance:LanceFolder", "no", ("lance",), "pip install pylance"),
        PeerKind("delta", "Delta (delta-rs)", "peer_delta:DeltaFolder", "no", ("deltalake",), "pip install deltalake"),
        PeerKind(
            "trinity", "Trinity-RFT SQLite", "peer_trinity:TrinitySQL", "SQLite default", ("trinity",),
            "pip install trinity-rft",
        ),
    )
}  # fmt: skip
"""Every peer, ours first."""


def padded(rows: pa.Table) -> Padded:
    """Right-padded zeros around the three token columns; a log-probability that is null is 0."""
    given = {name: _whole(rows.column(name)) for name in PAYLOAD}
    return {name: pad(*_flat(column)) for name, column in given.items()}


def pad(values: npt.NDArray[np.generic], starts: npt.NDArray[np.int32]) -> npt.NDArray[np.generic]:
    """`values[starts[i]:starts[i + 1]]` as row i."""
    lengths = np.diff(starts)
    block = np.zeros((len(lengths), int(lengths.max(initial=0))), dtype=values.dtype)
    for at, (start, length) in enumerate(zip(starts[:-1].tolist(), lengths.tolist(), strict=True)):
        block[at, :length] = values[start : start + length]
    return block


def _flat(column: pa.Array) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.int32]]:
    elements, starts = elements_of(column)
    values, valid = values_of(elements), valid_of(elements)
    return values if valid is None else np.where(valid == 1, values, values.dtype.type(0)), starts


def _whole(column: pa.ChunkedArray) -> pa.Array:
    whole = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if pa.types.is_large_list(whole.type):
        whole = whole.cast(pa.list_(whole.type.value_type))
    return whole
