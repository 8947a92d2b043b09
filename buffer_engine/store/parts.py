"""What a store is made of: its folder, and the catalog, segments and attachments that lie there or elsewhere.

Any combination works: both in the folder (one machine), catalog in PostgreSQL and segments in a folder that the
machines share, both shared. Segments on an object store beside a catalog file serve one machine with a small disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from buffer_engine.errors import StoreError
from buffer_engine.store.addresses import Addresses, remember, remembered, same_place
from buffer_engine.store.base import Durability
from buffer_engine.store.catalog import Catalog
from buffer_engine.store.faults import explained
from buffer_engine.store.files import LocalFiles, SegmentFiles
from buffer_engine.store.layout import StoreLayout, locate
from buffer_engine.store.media import LocalMediaFiles, MediaFiles
from buffer_engine.store.object_media import ObjectMediaFiles
from buffer_engine.store.object_writer import ObjectWriter
from buffer_engine.store.objects import ObjectFiles
from buffer_engine.store.segments import FrameWriter, SegmentWriter


@dataclass(frozen=True, slots=True)
class Parts:
    """Of one open store."""

    layout: StoreLayout
    catalog: Catalog
    files: SegmentFiles
    media: MediaFiles

    @contextmanager
    def afresh(self) -> Generator[Parts]:
        """The same, with nothing read from copies of objects that were made before."""
        if not isinstance(self.files, ObjectFiles):
            yield self
            return
        with self.files.afresh() as files:
            yield replace(self, files=files, media=ObjectMediaFiles(files))


def find_parts(
    path: str | os.PathLike[str],
    given: Addresses,
    *,
    create: bool,
    durability: Durability,
    read_only: bool,
    cache_bytes: int,
) -> Parts:
    """Open what lies in a folder or at the addresses; see `open_store`.

    Raises:
        StoreError: see `open_store`; also when the folder belongs to a store at other addresses.
    """
    # with addresses, the folder is only this machine's side of a store that may well be there already
    layout = locate(path, create=(create and not read_only) or given.elsewhere)
    new = not (layout.catalog.exists() or layout.addresses.exists())
    addresses = _agreed(layout, given, new=new)
    if not read_only:
        with explained(layout.root, "create the store" if new else "open the store"):
            (layout.root if addresses.segments else layout.segments).mkdir(parents=True, exist_ok=True)
    if addresses.segments is None:
        files, media = LocalFiles(layout), LocalMediaFiles(layout.root, durability=durability)
    else:
        files = ObjectFiles(layout.cache, addresses.segments, cache_bytes=cache_bytes)
        media = ObjectMediaFiles(files)
    if addresses.catalog is None:
        if new and given.elsewhere and (read_only or not create):
            raise StoreError(f"{layout.root}: there is no store here; check the path, or start a run that creates it")
        if new and addresses.elsewhere:
            remember(layout.root, addresses)  # before the catalog, which would be a store without it
        return _opened(Parts(layout, Catalog(layout, durability=durability, read_only=read_only), files, media))
    from buffer_engine.store.postgres_catalog import PostgresCatalog

    catalog = PostgresCatalog(
        layout, addresses.catalog, durability=durability, read_only=read_only, create=create and new,
        segments=addresses.segments,
    )  # fmt: skip
    try:
        _check_identity(layout, addresses, catalog.store_id)
        if new:
            remember(layout.root, replace(addresses, store_id=catalog.store_id))
    except BaseException:
        catalog.close()
        raise
    return _opened(Parts(layout, catalog, files, media))


def _opened(parts: Parts) -> Parts:
    """The parts, without copies of objects that are no longer: what was erased must not stay in them."""
    try:
        if isinstance(parts.files, ObjectFiles) and (copies := parts.files.copies()):
            gone = parts.catalog.read().execute(
                "SELECT value FROM json_each(?) WHERE value NOT IN (SELECT name FROM segments)", (json.dumps(copies),)
            )
            parts.files.drop([name for (name,) in gone.fetchall()])
    except BaseException:
        parts.catalog.close()
        raise
    return parts


def frame_writer(catalog: Catalog, files: SegmentFiles, *, durability: Durability, segment_bytes: int) -> FrameWriter:
    """The writer of frames that fits where the segments lie."""
    if isinstance(files, ObjectFiles):
        return ObjectWriter(files)
    return SegmentWriter(catalog, durability=durability, segment_bytes=segment_bytes)


def _agreed(layout: StoreLayout, given: Addresses, *, new: bool) -> Addresses:
    """The addresses of the store in the folder; those given may add passwords and another way to the same place."""
    if new:
        return given
    known = remembered(layout.root) or Addresses()
    if not given.elsewhere:
        return known
    if not same_place(known, given):
        raise StoreError(
            f"{layout.root}: this folder belongs to {_said(known)}, not to {_said(given)}; "
            "name another folder, or leave the addresses out"
        )
    return replace(given, store_id=known.store_id)


def _check_identity(layout: StoreLayout, addresses: Addresses, found: str) -> None:
    if addresses.store_id is not None and addresses.store_id != found:
        raise StoreError(
            f"{layout.root}: at {addresses.catalog} lies another store than the one that this folder belongs to; "
            "was the schema dropped and made again, or does the address lead to another server? Name a new folder"
        )


def _said(addresses: Addresses) -> str:
    if not addresses.elsewhere:
        return "a store that is all in it"
    parts = [f"{name} {one}" for name, one in (("catalog", addresses.catalog), ("segments", addresses.segments)) if one]
    return " and ".join(parts)
