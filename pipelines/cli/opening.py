"""Opening a store that the command line names: a wrong path is a wrong command, not a failure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from buffer_engine.errors import UsageError
from buffer_engine.inspect import Inspection, StoreAt, connect_store, connect_stores
from buffer_engine.store.layout import CATALOG, is_store

Tokenizer = Annotated[
    Path | None,
    typer.Option("--tokenizer", help="model folder, or a packaged model (smollm2-135m), that gives tokens their text"),
]
"""The option that gives `tokens.token_text` its texts."""


def require_store(folder: Path) -> Path:
    """The folder, when it holds a store.

    Raises:
        UsageError: nothing is there, or something else.
    """
    if not folder.exists():
        raise UsageError(f"{folder}: there is no store here; name the folder that a run writes (`store.path`)")
    if not is_store(folder):
        raise UsageError(
            f"{folder}: not a store ({CATALOG} is missing); name the folder that a run writes (`store.path`)"
        )
    return folder


def inspect_store(folder: Path, *, tokenizer: Path | None = None, until: int | None = None) -> Inspection:
    """SQL over a store.

    Args:
        tokenizer: folder with tokenizer.json, or name of a packaged model, that gives `tokens.token_text`; None: no
            texts.

    Raises:
        UsageError: the folder holds no store, or `tokenizer` is no tokenizer.
        MissingExtraError: a tokenizer is named and the package tokenizers is not installed.
    """
    store = require_store(folder)
    if tokenizer is None:
        return connect_store(store, until=until)
    from pipelines.vocabulary import read_vocabulary

    return connect_store(store, until=until, vocabulary=read_vocabulary(tokenizer))


def inspect_stores(stores: Sequence[tuple[str, Path, int | None]], *, tokenizer: Path | None = None) -> Inspection:
    """SQL over several stores, told apart by a column `store`.

    Args:
        stores: what was written, folder and version (None: now) of each.

    Raises:
        UsageError: a folder holds no store, or one is named twice with the same version.
    """
    for written, folder, _ in stores:
        require_store(folder)
        if [other for other, _, _ in stores].count(written) > 1:
            raise UsageError(f"{written} is named twice; to compare it with an earlier version write {written}@VERSION")
    vocabulary = None
    if tokenizer is not None:
        from pipelines.vocabulary import read_vocabulary

        vocabulary = read_vocabulary(tokenizer)
    names = _short_names([written for written, _, _ in stores])
    opened = {name: StoreAt(folder, version) for name, (_, folder, version) in zip(names, stores, strict=True)}
    return connect_stores(opened, vocabulary=vocabulary)


def _short_names(written: Sequence[str]) -> list[str]:
    """The last part of each path where that tells them apart, else all of it."""
    names = [Path(word).name for word in written]
    return names if len(set(names)) == len(names) and all(names) else list(written)
