"""Which scores are current, and the reward that follows from them.

The score log is append-only: the highest version of a component is the current one, and the reward is the weighted sum
of the current components. One definition, used for frames, for batches and while a pass is running.
"""

from __future__ import annotations

import json

import polars as pl
import pyarrow as pa

CURRENT_SCHEMA: dict[str, pl.DataType] = {
    "experience_id": pl.String(),
    "name": pl.String(),
    "value": pl.Float64(),
    "weight": pl.Float64(),
    "version": pl.Int32(),
}
"""Columns of a frame of scores that the functions here need and return."""


def read_scores(scores: pa.Table | pl.DataFrame | None) -> pl.DataFrame:
    """Any score rows (`schema.SCORES`; None: none) as a frame with the columns of `CURRENT_SCHEMA`."""
    if scores is None:
        return pl.DataFrame(schema=CURRENT_SCHEMA)
    if isinstance(scores, pa.Table):
        frame = pl.DataFrame(pl.from_arrow(scores.select(list(CURRENT_SCHEMA))))
    else:
        frame = scores.select(list(CURRENT_SCHEMA))
    return frame.select(pl.col(name).cast(dtype) for name, dtype in CURRENT_SCHEMA.items())


def current_scores(scores: pa.Table | pl.DataFrame | None) -> pl.DataFrame:
    """The highest version of every (experience_id, name), sorted by both; columns of `CURRENT_SCHEMA`."""
    return (
        read_scores(scores)
        .sort("experience_id", "name", "version")
        .unique(["experience_id", "name"], keep="last", maintain_order=True)
    )


def in_reward() -> pl.Expr:
    """True for the score rows that count: weight neither null nor 0."""
    return pl.col("weight").is_not_null() & (pl.col("weight") != 0)


def current_reward(scores: pa.Table | pl.DataFrame) -> pl.DataFrame:
    """The reward of every scored experience and the score versions behind it.

    Args:
        scores: score rows of any versions (columns experience_id, name, value, weight, version).
    Returns:
        One row per experience of `scores`, sorted by experience_id: `reward` is Σ weight·value over the current
        components whose weight is neither null nor 0; null if one of those values is null or if there is none.
        `score_versions_json` is a JSON object component → version of the components that count, `{}` if none does.
        Whether the rollout failed is not known here: such a row has no reward whatever its scores say.
    """
    current = current_scores(scores)
    # Names are distinct and few; quoting them once keeps the JSON correct for any name.
    quoted = {name: json.dumps(name, ensure_ascii=False) for name in current["name"].unique().to_list()}
    counted = current.filter(in_reward())
    sums = counted.group_by("experience_id", maintain_order=True).agg(
        pl.when(pl.col("value").is_null().any())
        .then(None)
        .otherwise((pl.col("weight") * pl.col("value")).sum())
        .alias("reward"),
        (pl.col("name").replace_strict(quoted, return_dtype=pl.String) + ": " + pl.col("version").cast(pl.String))
        .str.join(", ")
        .alias("versions"),
    )
    return (
        current.select(pl.col("experience_id").unique(maintain_order=True))
        .join(sums, on="experience_id", how="left", maintain_order="left")
        .select(
            "experience_id",
            pl.col("reward").cast(pl.Float64),
            ("{" + pl.col("versions").fill_null("") + "}").alias("score_versions_json"),
        )
    )
