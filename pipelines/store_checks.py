"""Checks of where the store will lie: a folder that can be made, addresses that can be read. Nothing is opened."""

from __future__ import annotations

import os

from buffer_engine.store.addresses import AddressError, CatalogAddress, SegmentsAddress
from pipelines.findings import Findings
from pipelines.secrets import without_markers
from pipelines.spec import Spec


def check_store(spec: Spec, found: Findings) -> None:
    """The folder can be made and written; it is not made here."""
    folder = spec.store.path
    if spec.store.retain and spec.store.compact is None:
        found.problem(
            ("store", "retain"),
            "nothing says when the rules are applied",
            "write `compact: {every_steps: 10}` beside it",
        )
    if folder.exists() and not folder.is_dir():
        found.problem(("store", "path"), f"{folder} is a file, not a folder", "name another folder")
        return
    nearest = next((path for path in (folder, *folder.absolute().parents) if path.exists()), None)
    if nearest is not None and not nearest.is_dir():
        found.problem(
            ("store", "path"), f"{nearest} is a file, so {folder} cannot be made in it", "name another folder"
        )
    elif nearest is not None and not os.access(nearest, os.W_OK | os.X_OK):
        found.problem(
            ("store", "path"), f"the folder {nearest} cannot be written", "change its permissions or the path"
        )


def check_addresses(spec: Spec, found: Findings) -> None:
    """Addresses say what they must, and no secret is written into the file, which a run copies into its store."""
    for name, written, kind in (
        ("catalog", spec.store.catalog, CatalogAddress),
        ("segments", spec.store.segments, SegmentsAddress),
    ):
        if written is None or written.startswith("${env:"):
            continue
        try:
            address = kind.parse(without_markers(written))
        except AddressError as error:
            found.problem(("store", name), error.said, error.fix)
            continue
        secret = address.password if isinstance(address, CatalogAddress) else address.secret_key
        if secret is not None and f":{secret}@" in written:
            variable = "PGPASSWORD" if name == "catalog" else "AWS_SECRET_ACCESS_KEY"
            found.problem(
                ("store", name),
                "the address holds a secret, and a run copies its specification into the store",
                f"leave it out and set {variable}, or write ${{env:NAME}} in its place",
            )
