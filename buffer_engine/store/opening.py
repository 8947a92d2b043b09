"""Opening a store: in a folder, or at the addresses that the folder remembers."""

from __future__ import annotations

import os

from buffer_engine.store.addresses import Addresses
from buffer_engine.store.base import Durability
from buffer_engine.store.local import LocalStore
from buffer_engine.store.objects import CACHE_BYTES
from buffer_engine.store.parts import find_parts
from buffer_engine.store.pressure import BackPressure


def open_store(
    path: str | os.PathLike[str],
    *,
    create: bool = True,
    durability: Durability = "power",
    read_only: bool = False,
    back_pressure: BackPressure | None = None,
    catalog: str | None = None,
    segments: str | None = None,
    cache_bytes: int = CACHE_BYTES,
) -> LocalStore:
    """Open the store in a folder.

    Args:
        path: folder of the store; of a shared one, this machine's side of it.
        create: make the folder and an empty store when there is none.
        durability: `power` returns from an append when the rows survive loss of power, `process` when they survive
            the death of any process; the reader sees no difference.
        read_only: for inspection; creates nothing and works while others write.
        back_pressure: has appends of training rollouts wait while many are still to be trained; None: they never do.
        catalog: `postgresql://…?schema=NAME`, for a catalog that several machines share; None: as the folder says, and
            in a new folder a file of its own. The folder remembers it without a password.
        segments: `s3://bucket/prefix?…`, for segments on an object store; None: as the folder says, else in it.
        cache_bytes: most bytes of copies of objects below the folder.

    Raises:
        MissingExtraError: the catalog needs psycopg, which is not installed.
        StoreVersionError: the store has another schema version.
        StoreError: nothing is there and nothing may be created, the folder holds something else or is read-only.
    """
    parts = find_parts(
        path,
        Addresses.parse(catalog, segments),
        create=create,
        durability=durability,
        read_only=read_only,
        cache_bytes=cache_bytes,
    )
    return LocalStore(parts, durability=durability, back_pressure=back_pressure)
