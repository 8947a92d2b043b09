"""balance_sample: the mix of rows that was asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import polars as pl
import xxhash
from pydantic import Field, model_validator

from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.verdicts import verdicts_of


class BalanceSampleConfig(OperatorConfig):
    """What is balanced, and to which shares."""

    by: str | None = Field(None, description="column whose values are balanced; null: only `max_units` counts")
    target: Mapping[str, float] = Field(
        {}, description="value (as text) → weight of its share; empty: equal shares of the values that are there"
    )
    max_units: int | None = Field(None, ge=1, description="most units that stay; null: as many as the shares allow")
    unit: Literal["group", "row"] = Field("group", description="what is drawn: whole groups, or single rows")

    @model_validator(mode="after")
    def _shares_make_sense(self) -> BalanceSampleConfig:
        if self.by is None and self.max_units is None:
            raise ValueError("give by, max_units or both")
        if self.target and self.by is None:
            raise ValueError("target needs `by`")
        if any(weight <= 0 for weight in self.target.values()):
            raise ValueError("weights of target must be above 0; values that are not named are rejected anyway")
        return self


class BalanceSample(Operator[BalanceSampleConfig]):
    """Draws rows or whole groups so that the values of a column have the shares that were asked for.

    The shares are kept exactly, up to whole units: as many units stay as every value can deliver its share of, at most
    `max_units`; what is left over by rounding goes to the largest remainders, ties in the order of the values. Nothing
    is drawn twice. Within a value those units stay whose id has the lowest hash with the seed (xxh3), so the choice
    does not depend on order, batch size or machine. A group has the value of its row with the lowest sample_index.
    Reasons: `not_drawn`, and `no_target` for values, and null, that have no share.
    """

    Config = BalanceSampleConfig

    def contract(self) -> Contract:
        """Reads the column; needs all rows; rejects."""
        by = () if self.config.by is None else (self.config.by,)
        return Contract(reads=frozenset((*by, "sample_index")), scope="frame", drops=True)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Draw."""
        unit = "group_id" if self.config.unit == "group" else "experience_id"
        value = pl.lit("all") if self.config.by is None else pl.col(self.config.by).cast(pl.String)
        units = (
            frame.select(unit=pl.col(unit), value=value, first=pl.struct("sample_index", "experience_id"))
            .sort("unit", "first")
            .unique("unit", keep="first", maintain_order=True)
        )
        # A Python loop: one hash a unit. Polars' own hash may change with its version, this one may not.
        hashes = [xxhash.xxh3_64_intdigest(name.encode(), seed=context.seed) for name in units["unit"]]
        ranked = units.with_columns(pl.Series("hash", hashes, pl.UInt64)).with_columns(
            rank=pl.struct("hash", "unit").rank("ordinal").over("value")
        )
        counts = dict(units["value"].drop_nulls().value_counts().rows())
        quotas = _quotas(counts, self.config.target or dict.fromkeys(counts, 1.0), self.config.max_units)
        drawn = ranked.with_columns(
            quota=pl.col("value").replace_strict(quotas, default=None, return_dtype=pl.Int64)
            if quotas
            else pl.lit(None, pl.Int64)
        )
        rows = frame.select(unit=pl.col(unit)).join(drawn, on="unit", how="left", maintain_order="left")
        reason = (
            pl.when(pl.col("quota").is_null())
            .then(pl.lit("no_target"))
            .when(pl.col("rank") > pl.col("quota"))
            .then(pl.lit("not_drawn"))
        )
        shown = pl.col("value").fill_null("null")
        detail = (
            pl.when(pl.col("quota").is_null())
            .then(pl.format("{} has no share", shown))
            .otherwise(pl.format("{}: number {} of {} drawn", shown, "rank", "quota"))
        )
        return Result(verdicts=verdicts_of(rows, "reject", reason, detail=detail))


def _quotas(counts: Mapping[str, int], target: Mapping[str, float], most: int | None) -> dict[str, int]:
    """Units of each value of `target` that stay."""
    shares = {value: weight / math.fsum(target.values()) for value, weight in target.items()}
    if not shares:
        return {}
    # the small surplus keeps 3 / 0.3 from becoming 9.999…
    whole = min(math.floor(counts.get(value, 0) / share + 1e-9) for value, share in shares.items())
    whole = whole if most is None else min(whole, most)
    quotas = {value: math.floor(share * whole + 1e-9) for value, share in shares.items()}
    remainders = sorted(shares, key=lambda value: (quotas[value] - shares[value] * whole, value))
    for value in remainders[: whole - sum(quotas.values())]:
        quotas[value] += 1
    return {value: min(quota, counts.get(value, 0)) for value, quota in quotas.items()}
