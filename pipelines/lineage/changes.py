"""Other scores for a batch: versions, weights and values that somebody wants to try, and what they make of its rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from buffer_engine.errors import UsageError, did_you_mean
from buffer_engine.store.base import ExperienceStore
from operators.expressions import roots, row_expression
from operators.frame import FRAME_COLUMNS, build_frame, rollout_columns
from operators.reward_state import CURRENT_SCHEMA
from pipelines.lineage.finding import StoredBatch

_VERSION = re.compile(r"(?P<name>.+)@(?:v(?P<version>\d+)|(?P<latest>latest))")


@dataclass(frozen=True, slots=True)
class Changes:
    """What to try.

    Attributes:
        without: operator to leave out; its score component counts no more, its rejections and masks are undone.
        versions: component → version to use where a row has it (else the newest below it); None: the newest of now.
        values: component → SQL expression over one row that gives its value.
        weights: component → share in the reward.
    """

    without: str | None = None
    versions: Mapping[str, int | None] = field(default_factory=dict[str, "int | None"])
    values: Mapping[str, str] = field(default_factory=dict[str, str])
    weights: Mapping[str, float] = field(default_factory=dict[str, float])


def parse_changes(*, without: str | None, scores: Sequence[str], weights: Sequence[str]) -> Changes:
    """Changes from the command line: `NAME@v2`, `NAME@latest` or `NAME=EXPRESSION`; `NAME=0.5`.

    Raises:
        UsageError: a text is none of these, or a component is named twice.
    """
    versions: dict[str, int | None] = {}
    values: dict[str, str] = {}
    shares: dict[str, float] = {}
    for text in scores:
        name, equals, expression = text.partition("=")
        version = _VERSION.fullmatch(text) if not equals else None
        if version is not None:
            name = version["name"]
        if not name or (version is None and not expression.strip()):
            raise UsageError(f"--score {text!r}: write NAME@v2, NAME@latest or NAME=EXPRESSION")
        if name in versions or name in values:
            raise UsageError(f"--score names {name!r} twice")
        if version is not None:
            versions[name] = None if version["latest"] else int(version["version"])
        else:
            values[name] = expression
    for text in weights:
        name, _, number = text.partition("=")
        if name in shares:
            raise UsageError(f"--weight names {name!r} twice")
        try:
            shares[name] = float(number)
        except ValueError as error:
            raise UsageError(f"--weight {text!r}: write NAME=NUMBER") from error
        if not name or shares[name] - shares[name] != 0:
            raise UsageError(f"--weight {text!r}: write NAME=NUMBER, a finite one")
    return Changes(without, versions, values, shares)


def changed_scores(
    store: ExperienceStore, found: StoredBatch, scores: pl.DataFrame, ids: Sequence[str], changes: Changes
) -> pl.DataFrame:
    """One score per row and component (columns of `CURRENT_SCHEMA`), as the changes would have it.

    Args:
        scores: all versions of the scores of these rows, with `used`: true for the one that the manifest knew.

    Raises:
        UsageError: a component or version is not there, an expression cannot be evaluated, or a new component has no
            weight.
    """
    scores = scores.filter(pl.col("experience_id").is_in(list(ids)))
    names: set[str] = set(scores["name"].unique().to_list())
    for name in changes.versions:
        if name not in names:
            raise UsageError(f"--score {name!r}: no row of the batch has this component: {did_you_mean(name, names)}")
    for name in changes.weights:
        if name not in names and name not in changes.values:
            raise UsageError(f"--weight {name!r}: no row of the batch has this component: {did_you_mean(name, names)}")
    chosen = _chosen_versions(scores, changes.versions)
    for name, text in changes.values.items():
        chosen = _with_value(store, found, chosen, ids, name, text, changes.weights.get(name))
    for name, share in changes.weights.items():
        chosen = chosen.with_columns(
            weight=pl.when(pl.col("name") == name).then(pl.lit(share)).otherwise(pl.col("weight"))
        )
    return chosen if changes.without is None else chosen.filter(pl.col("name") != changes.without)


def _chosen_versions(scores: pl.DataFrame, versions: Mapping[str, int | None]) -> pl.DataFrame:
    wanted = scores.filter(pl.col("used") & ~pl.col("name").is_in(list(versions)))
    parts = [wanted.select(list(CURRENT_SCHEMA))]
    for name, version in versions.items():
        of_name = scores.filter(pl.col("name") == name)
        if version is not None:
            newest = of_name["version"].max()
            if version < 1 or (isinstance(newest, int) and version > newest):
                raise UsageError(f"--score {name}@v{version}: the batch's rows have versions 1 to {newest} of it")
            of_name = of_name.filter(pl.col("version") <= version)
        latest = of_name.sort("version").unique("experience_id", keep="last", maintain_order=True)
        parts.append(latest.select(list(CURRENT_SCHEMA)))
    return pl.concat(parts)


def _with_value(
    store: ExperienceStore,
    found: StoredBatch,
    chosen: pl.DataFrame,
    ids: Sequence[str],
    name: str,
    text: str,
    weight: float | None,
) -> pl.DataFrame:
    """The scores with those of component `name` replaced by an expression over each row."""
    try:
        expression = row_expression(text)
    except ValueError as error:
        raise UsageError(f"--score {name}={text}: {error}") from error
    components: set[str] = set(chosen["name"].unique().to_list())
    for column in roots(expression):
        if column not in FRAME_COLUMNS and column not in components:
            known = {*FRAME_COLUMNS, *components}
            raise UsageError(f"--score {name}={text}: unknown column {column!r}: {did_you_mean(column, known)}")
    columns = roots(expression) | {"experience_id"}
    rollouts = store.fetch(list(ids), columns=rollout_columns(columns))
    frame = build_frame(rollouts, store.table("tasks"), chosen.to_arrow(), columns=columns, info_columns={})
    try:
        values = frame.select("experience_id", value=expression.cast(pl.Float64))
    except pl.exceptions.PolarsError as error:
        raise UsageError(f"--score {name}={text}: {error}") from error
    bad = values.filter(pl.col("value").is_not_null() & ~pl.col("value").is_finite())
    if bad.height:
        raise UsageError(f"--score {name}={text}: it is {bad['value'][0]} for row {bad['experience_id'][0]}")
    before = chosen.filter(pl.col("name") == name)
    if not before.height and weight is None:
        raise UsageError(f"--score {name}={text}: the component is new, so say its share with --weight {name}=1")
    usual = before["weight"].drop_nulls().mode().sort() if before.height else pl.Series([weight], dtype=pl.Float64)
    fresh = values.join(before.select("experience_id", "weight"), on="experience_id", how="left").select(
        "experience_id",
        name=pl.lit(name),
        value=pl.col("value"),
        weight=pl.col("weight").fill_null(usual[0] if usual.len() else None),
        version=pl.lit(0, pl.Int32),
    )
    return pl.concat([chosen.filter(pl.col("name") != name), fresh.select(list(CURRENT_SCHEMA))])
