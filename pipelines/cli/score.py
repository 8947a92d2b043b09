"""`buffer-engine score`: late scores from a file into a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from buffer_engine.errors import UsageError, did_you_mean
from buffer_engine.scoring import ScoreSource, add_scores
from buffer_engine.store.opening import open_store
from pipelines.cli.console import logs, print_text
from pipelines.cli.opening import require_store
from pipelines.lineage.score_files import read_scores


def score(
    store: Annotated[Path, typer.Argument(help="folder of the store")],
    file: Annotated[Path, typer.Option("--from", help="CSV, JSON lines or Parquet with experience_id and value")],
    name: Annotated[str | None, typer.Option("--name", help="component, when the file has no such column")] = None,
    author: Annotated[str | None, typer.Option("--author", help="who scored, when the file has no such column")] = None,
    weight: Annotated[
        float | None, typer.Option("--weight", help="share in the reward [default: what the component has, else none]")
    ] = None,
    source: Annotated[
        str, typer.Option("--source", help="operator | workflow | judge | human | import | api")
    ] = "human",
) -> None:
    """Add scores to stored rows, also to those that were trained on; earlier scores stay as history.

    The same file again changes nothing. All rows are checked before the first is written.
    """
    if source not in get_args(ScoreSource):
        raise UsageError(f"--source {source!r}: {did_you_mean(source, get_args(ScoreSource))}")
    folder = require_store(store)
    scores, places = read_scores(file)
    for column, given in (("name", name), ("author", author)):
        if column not in scores.column_names and given is None:
            raise UsageError(f"{file}: there is no column {column}; add one, or say --{column} for all rows")
    with open_store(folder, create=False) as opened:
        receipt = add_scores(
            opened,
            scores,
            name=name,
            author=author,
            weight=weight,
            source=cast("ScoreSource", source),
            places=[f"{file}, {place}" for place in places],
        )
    print_text(
        f"{folder}: {receipt.added:,} scores added ({receipt.superseding:,} in place of earlier ones), "
        f"{receipt.unchanged:,} already there; version {receipt.version}"
    )
    if receipt.metrics:
        logs.print(
            f"{receipt.metrics:,} of them have no weight: they are metrics and change no reward; --weight X makes "
            "them part of it",
            style="dim",
            markup=False,
        )
