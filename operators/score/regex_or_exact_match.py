"""regex_or_exact_match: the answer compared with the gold answer as text."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import polars as pl
from pydantic import Field

from operators.base import Context, Contract, Operator, Result, RowError, ScoreOperatorConfig
from operators.expressions import Extraction, last_match


class RegexOrExactMatchConfig(ScoreOperatorConfig):
    """Where the answer and the gold answer are, and how they are compared."""

    column: str = Field("response", description="text column with the answer")
    gold: str = Field(description="column with the gold answer; in mode regex, with the regular expression")
    mode: Literal["exact", "regex", "contains", "f1"] = Field(
        "exact",
        description="exact: equal text; regex: the whole answer matches gold; contains: gold occurs in the answer; "
        "f1: harmonic mean of word precision and recall",
    )
    extract: Extraction | None = Field(
        None, description="regular expression with one group; the group of its last match is the answer"
    )
    ignore_case: bool = Field(False, description="compare lower-cased text")
    strip: bool = Field(True, description="ignore blanks around answer and gold")


class RegexOrExactMatch(Operator[RegexOrExactMatchConfig]):
    """Scores 1 where the answer matches the gold answer and 0 where it does not; mode f1 gives fractions.

    A row without a gold answer cannot be scored (null). A row in which `extract` finds nothing has no answer: 0. Gold
    values that are numbers or truth values are compared by their text. A gold that is not a valid regular expression
    in mode regex is an error of its row.
    """

    Config = RegexOrExactMatchConfig

    def contract(self) -> Contract:
        """Reads answer and gold; scores its own component."""
        return Contract(reads=frozenset((self.config.column, self.config.gold)), scores=(self.config.name,))

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Compare every row."""
        answer = self._prepared(last_match(pl.col(self.config.column), self.config.extract))
        gold = pl.col(self.config.gold).cast(pl.String)
        # Stripping or lower-casing a pattern would change what it means.
        pairs = frame.select(answer=answer, gold=gold if self.config.mode == "regex" else self._prepared(gold))
        if self.config.mode == "f1":
            return Result(scores={self.config.name: _f1(pairs).alias(self.config.name)})
        values = pairs.select(
            pl.when(pl.col("gold").is_null())
            .then(None)
            .when(pl.col("answer").is_null())
            .then(0.0)
            .otherwise(self._match().cast(pl.Float64))
            .cast(pl.Float64)
            .alias(self.config.name)
        ).to_series()
        unusable = (pairs["gold"].is_not_null() & pairs["answer"].is_not_null() & values.is_null()).arg_true()
        return Result(
            scores={self.config.name: values},
            errors=[RowError(row, f"gold is not a regular expression: {pairs['gold'][row]!r}") for row in unusable],
        )

    def _prepared(self, text: pl.Expr) -> pl.Expr:
        stripped = text.str.strip_chars() if self.config.strip else text
        return stripped.str.to_lowercase() if self.config.ignore_case else stripped

    def _match(self) -> pl.Expr:
        answer, gold = pl.col("answer"), pl.col("gold")
        if self.config.mode == "exact":
            return answer == gold
        if self.config.mode == "contains":
            return answer.str.contains(gold, literal=True)
        flags = "(?i)" if self.config.ignore_case else ""
        return answer.str.contains(pl.lit(rf"{flags}\A(?:") + gold + pl.lit(r")\z"), strict=False)


def _f1(pairs: pl.DataFrame) -> pl.Series:
    # A Python loop: the overlap of two bags of words has no vectorised form that is cheaper.
    values: list[float | None] = []
    for answer, gold in pairs.rows():
        if gold is None:
            values.append(None)
            continue
        found, wanted = Counter((answer or "").split()), Counter(gold.split())
        shared = (found & wanted).total()
        values.append(2 * shared / (found.total() + wanted.total()) if shared else float(found == wanted))
    return pl.Series(values, dtype=pl.Float64)
