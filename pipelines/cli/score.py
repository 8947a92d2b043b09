"""`buffer-engine score`: late scores into a store, from a file or by an operator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from buffer_engine.errors import UsageError, did_you_mean
from buffer_engine.scoring import ScoreSource, add_scores
from buffer_engine.store.opening import open_store
from pipelines.cli.console import logs, print_text
from pipelines.cli.opening import require_store
from pipelines.cli.rescore import RescoreOptions, score_with
from pipelines.lineage.score_files import read_scores


def score(
    store: Annotated[Path, typer.Argument(help="folder of the store")],
    file: Annotated[
        Path | None, typer.Option("--from", help="CSV, JSON lines or Parquet with experience_id and value")
    ] = None,
    operator: Annotated[
        Path | None, typer.Option("--with", help="YAML file with a score operator to run over stored rows")
    ] = None,
    where: Annotated[
        str | None, typer.Option("--where", help="with --with: SQL condition on experiences [default: all rows]")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="component, when the file has no such column; with --with: NAME or NAME@v2"),
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="with --with: show the values before and after; write nothing")
    ] = False,
    chunk_rows: Annotated[
        int, typer.Option("--chunk-rows", help="with --with: rows that become visible together")
    ] = 1024,
    author: Annotated[str | None, typer.Option("--author", help="who scored, when the file has no such column")] = None,
    weight: Annotated[
        float | None, typer.Option("--weight", help="share in the reward [default: what the component has, else none]")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--source", help="operator | workflow | judge | human | import | api [default: human]"),
    ] = None,
) -> None:
    """Add scores to stored rows, also to those that were trained on; earlier scores stay as history.

    The same file again changes nothing. All rows are checked before the first is written.

    --with runs an operator over the rows instead; after an interruption the same command goes on where it stopped.
    """
    if (file is None) == (operator is None):
        raise UsageError("say where the scores come from: --from FILE, or --with OPERATOR.yaml")
    if operator is not None:
        for option, given in (("--author", author), ("--weight", weight), ("--source", source)):
            if given is not None:
                raise UsageError(f"{option} is for --from; with --with the operator's file says it")
        score_with(store, operator, RescoreOptions(where, name, chunk_rows, dry))
        return
    if where is not None or dry:
        raise UsageError(f"{'--where' if where is not None else '--dry-run'} is for --with")
    assert file is not None
    _from_file(store, file, name=name, author=author, weight=weight, source=source or "human")


def _from_file(
    store: Path, file: Path, *, name: str | None, author: str | None, weight: float | None, source: str
) -> None:
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
