"""Which storages are measured, what each of them must be able to do, and which Python runs it.

Each peer stores the same Arrow rows in the way that suits it best; a score is a row of its own wherever the peer has
more than one table, so none has to rewrite a rollout to be scored. Peers pin libraries that do not agree with each
other, so each runs in a process of its own, and where it needs more than this project in an environment of its own
(`python -m benchmarks.store.peers_env`). This module and the adapters therefore import nothing but numpy and pyarrow.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

PAYLOAD = ("token_ids", "loss_mask", "logprobs")
Padded = dict[str, npt.NDArray[np.generic]]


class Unsupported(Exception):
    """The peer has no such operation; the text goes into the table."""


class Peer(Protocol):
    """One opened storage; the process that opens it may be one of several."""

    def prepare(self, rows: pa.Table) -> Any:
        """What `append` takes, made before the clock runs: Arrow rows, or the peer's own objects."""
        ...

    def append(self, prepared: Any) -> None:
        """Store rollouts, as durably as the peer can."""
        ...

    def objects(self, rows: pa.Table) -> Any:
        """The same rows as the Python objects that a program has in hand, made before the clock runs."""
        ...

    def append_objects(self, objects: Any) -> None:
        """Encode and store them."""
        ...

    def batch(self, ids: list[str]) -> Padded:
        """These rollouts as padded arrays of shape [rows, longest], one for each of `PAYLOAD`."""
        ...

    def score(self, scores: pa.Table) -> None:
        """Store one late score for each of many rollouts."""
        ...

    def reward(self, scores: pa.Table) -> None:
        """Change the reward that a reader of these rollouts sees to `value`."""
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

    def keep(self, ids: list[str]) -> None:
        """Let these rollouts be trained on; nothing where a peer trains on whatever it has."""
        ...

    def take(self, rows: int, number: int, who: str) -> list[str]:
        """Rows for a batch that nobody else gets, counted as used; names of the rows, or of their places."""
        ...

    def compact(self) -> None:
        """Put what was appended into the form that is kept for long."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class ArrowPeer:
    """What peers that take Arrow rows share."""

    schema: pa.Schema

    def prepare(self, rows: pa.Table) -> pa.Table:
        """Nothing to do."""
        return rows

    def objects(self, rows: pa.Table) -> list[dict[str, Any]]:
        """One dict per row, token columns as lists, as explorers hand them over."""
        self.schema = rows.schema
        return rows.to_pylist()

    def append_objects(self, objects: list[dict[str, Any]]) -> None:
        """Through Arrow's own encoder."""
        self.append(pa.Table.from_pylist(objects, self.schema))

    def append(self, prepared: pa.Table) -> None:
        """Of the peer."""
        raise NotImplementedError

    def reward(self, scores: pa.Table) -> None:
        """Files that are written once would all be written again."""
        raise Unsupported("no such operation")

    def keep(self, ids: list[str]) -> None:
        """Nothing to do."""

    def take(self, rows: int, number: int, who: str) -> list[str]:
        """Files and tables know no consumers."""
        raise Unsupported("no such operation")

    def compact(self) -> None:
        """Most have no such thing."""
        raise Unsupported("no such operation")


@dataclass(frozen=True, slots=True)
class PeerKind:
    """A peer by name.

    Attributes:
        syncs: what an append waits for, in words: the one thing that makes durable numbers comparable.
        requirements: what its environment holds; empty: it runs in this project's own.
        shared: several processes may have it open.
        alone: it keeps processes busy while it is open, so it is measured when nothing else is open.
        by_id: a batch is the rows that were asked for; otherwise the peer chooses them.
        notes: what a reader must know beside its numbers.
    """

    name: str
    title: str
    target: str
    syncs: str
    requirements: tuple[str, ...] = ()
    shared: bool = True
    alone: bool = False
    by_id: bool = True
    notes: str = ""

    def python(self) -> Path | None:
        """The interpreter that can run it, or None where its environment is missing or holds other releases."""
        if not self.requirements:
            return Path(sys.executable)
        place = environments() / self.name
        marker = place / "requirements.txt"
        made = marker.read_text(encoding="utf-8").split("\n") if marker.is_file() else []
        return place / "bin" / "python" if made == list(self.requirements) else None

    def missing(self) -> str | None:
        """`not installed: python -m …`, or None where it can be used."""
        return None if self.python() else f"not installed: python -m benchmarks.store.peers_env {self.name}"

    def adapter(self) -> Callable[[Path], Peer]:
        """What opens its storage in a folder; to be called in its own environment."""
        module, _, name = self.target.partition(":")
        return getattr(import_module(f"benchmarks.store.{module}"), name)


def environments() -> Path:
    """Where the environments of peers lie: `bench` in the cache folder (`BUFFER_ENGINE_CACHE`)."""
    return Path(os.environ.get("BUFFER_ENGINE_CACHE") or Path.home() / ".cache" / "buffer-engine") / "bench"


_ARROW = ("pyarrow==26.*", "numpy==2.*", "duckdb==2.0.*")

KINDS = {
    kind.name: kind
    for kind in (
        PeerKind("ours", "buffer-engine", "peer_ours:Ours", "fdatasync + SQLite FULL"),
        PeerKind(
            "ours-process", "buffer-engine, process", "peer_ours:OursProcess", "no sync",
            notes="durability process: rows survive SIGKILL of any process, a power cut may take the newest",
        ),
        PeerKind(
            "trinity", "Trinity-RFT SQLite", "peer_trinity:TrinitySQL", "SQLite FULL",
            ("trinity-rft==0.6.0", "pyarrow==25.*", "greenlet"), by_id=False,
            notes="its own SQLExperienceStorage without Ray; store-side and from objects are the same, since what it "
            "takes are its Experience objects; it has no reads by id (a batch is its own read) and no late scores "
            "(an UPDATE of its reward column through its engine, which overwrites); only model_version is a column; "
            "four processes that read one file are not its usual way, which is one Ray actor",
        ),
        PeerKind(
            "transferqueue", "TransferQueue", "peer_transferqueue:TransferQueuePeer", "nothing: RAM only",
            ("TransferQueue==0.1.11", "torch", "pyarrow==26.*", "numpy==2.*"), alone=True,
            notes="RAM only: nothing survives its processes; no SQL; processor time and memory include its Ray actors",
        ),
        PeerKind(
            "lance", "Lance", "peer_lance:LanceFolder", "no sync", ("pylance==14.*", *_ARROW),
            notes="does not sync local files: rows survive a killed process and not a power cut",
        ),
        PeerKind("duckdb", "DuckDB file", "peer_duckdb:DuckDBFile", "fsync of its log", shared=False),
        PeerKind(
            "delta", "Delta (delta-rs)", "peer_delta:DeltaFolder", "no sync", ("deltalake==1.6.*", *_ARROW),
            notes="does not sync local files: rows survive a killed process and not a power cut",
        ),
        PeerKind("parquet", "Parquet files (zstd)", "peer_parquet:ParquetFiles", "fsync file + folder"),
        PeerKind("sqlite", "SQLite blobs", "peer_sqlite:SQLiteBlobs", "SQLite FULL"),
    )
}  # fmt: skip
"""Every peer, ours first."""


def padded(rows: pa.Table) -> Padded:
    """Right-padded zeros around the three token columns; a log-probability that is null is 0."""
    return {name: pad(*flat(rows.column(name))) for name in PAYLOAD}


def pad(values: npt.NDArray[np.generic], starts: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.generic]:
    """`values[starts[i]:starts[i + 1]]` as row i."""
    lengths = np.diff(starts)
    block = np.zeros((len(lengths), int(lengths.max(initial=0))), dtype=values.dtype)
    for at, (start, length) in enumerate(zip(starts[:-1].tolist(), lengths.tolist(), strict=True)):
        block[at, :length] = values[start : start + length]
    return block


def flat(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.integer[Any]]]:
    """Elements of all lists of a column one after the other, null as 0 or False, and where each list begins."""
    whole = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    offsets = whole.offsets.to_numpy()
    elements = whole.values.slice(offsets[0], offsets[-1] - offsets[0])
    if elements.null_count:
        elements = elements.fill_null(False if pa.types.is_boolean(elements.type) else 0)
    return elements.to_numpy(zero_copy_only=False), offsets - offsets[0]
