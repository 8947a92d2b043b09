"""replace_pattern: ordered replacements in text."""

from __future__ import annotations

from functools import reduce

import polars as pl
from pydantic import Field, model_validator

from buffer_engine.config import ComponentConfig
from operators.expressions import group_count
from operators.mending import MendConfig, Mender


class Replacement(ComponentConfig):
    """One replacement: what is looked for and what stands there afterwards."""

    pattern: str = Field(min_length=1, description="regular expression, or the text itself with `literal`")
    new: str = Field("", description="new text; $1 or ${name} insert groups of the pattern, $$ is a $")
    literal: bool = Field(False, description="take pattern and `new` as they stand")

    @model_validator(mode="after")
    def _pattern_is_one(self) -> Replacement:
        if not self.literal:
            group_count(self.pattern)
        return self


class ReplacePatternConfig(MendConfig):
    """The replacements, in order."""

    rules: tuple[Replacement, ...] = Field(
        min_length=1, description="replacements, first to last; each sees what the ones before it made"
    )


class ReplacePattern(Mender[ReplacePatternConfig]):
    """Replaces every match of every rule, rule after rule, for the operators after it.

    Matches of one rule do not overlap and are found left to right. A match may be empty, and a replacement may remove.
    Null stays null. With `rewrite: true` imported text rows are replaced (`replaced`), as by `normalize_text`.
    """

    Config = ReplacePatternConfig

    def mend(self, texts: pl.Series) -> pl.Series:
        """Apply every rule."""
        return texts.to_frame("text").select(reduce(_replaced, self.config.rules, pl.col("text"))).to_series()


def _replaced(text: pl.Expr, rule: Replacement) -> pl.Expr:
    return text.str.replace_all(rule.pattern, rule.new, literal=rule.literal)
