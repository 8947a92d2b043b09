"""extract_reasoning: what the model thought and what it answered, as columns of their own."""

from __future__ import annotations

import re
from typing import Literal

import polars as pl
from pydantic import Field, model_validator

from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.verdicts import verdicts_of


class ExtractReasoningConfig(OperatorConfig):
    """The tags around the reasoning, and where its parts go."""

    column: str = Field("response", description="text column")
    open: str = Field("<think>", min_length=1, description="text before the reasoning")
    close: str = Field("</think>", min_length=1, description="text after the reasoning")
    into: tuple[str, str] = Field(("reasoning", "answer"), description="new columns: the reasoning, the rest")
    opened_by_template: bool = Field(
        False, description="the chat template already wrote `open`: a text without it begins inside the reasoning"
    )
    unclosed: Literal["keep", "reject", "mask"] = Field(
        "keep", description="a row whose reasoning never closes: keep it, reject it, or keep it out of the loss"
    )

    @model_validator(mode="after")
    def _names_differ(self) -> ExtractReasoningConfig:
        if self.open == self.close:
            raise ValueError("open and close are the same text")
        if self.into[0] == self.into[1]:
            raise ValueError(f"both parts would go into {self.into[0]!r}")
        return self


class ExtractReasoning(Operator[ExtractReasoningConfig]):
    """Splits a text at its first `open` and the last `close` after it; both parts lose the blanks around them.

    The reasoning is what lies between the tags; the answer is what stands before and after them, in that order. Where
    there is no `open` (and the template has not written one), the reasoning is null and the answer the whole text.
    Where the reasoning never closes, everything after `open` is reasoning, the answer is what stood before it, and the
    row is kept, rejected or masked with reason `unclosed`. With `opened_by_template` a text without `open` begins in
    the reasoning. Null text gives two nulls.
    """

    Config = ExtractReasoningConfig

    def contract(self) -> Contract:
        """Reads the column; writes both parts; may reject or mask."""
        return Contract(
            reads=frozenset((self.config.column,)),
            writes={name: pl.String() for name in self.config.into},
            drops=self.config.unclosed == "reject",
            masks=self.config.unclosed == "mask",
        )

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Find the tags and split."""
        config = self.config
        opening, closing = re.escape(config.open), re.escape(config.close)
        text = pl.col(config.column)
        # Lazy before the first `open`, greedy before the last `close`; (?s) lets the dot match line ends.
        parts = text.str.extract_groups(rf"(?s)\A(?P<before>.*?){opening}(?P<rest>.*)\z")
        before, rest = parts.struct.field("before"), parts.struct.field("rest")
        if config.opened_by_template:
            begins = ~text.str.contains(config.open, literal=True)
            before = pl.when(begins).then(pl.lit("")).otherwise(before)
            rest = pl.when(begins).then(text).otherwise(rest)
        split = frame.select(text=text, before=before, rest=rest).with_columns(
            pair=pl.col("rest").str.extract_groups(rf"(?s)\A(?P<inside>.*){closing}(?P<after>.*)\z")
        )
        inside, after = pl.col("pair").struct.field("inside"), pl.col("pair").struct.field("after")
        found = split.select(
            reasoning=pl.coalesce(inside, "rest").str.strip_chars(),
            answer=pl.when(pl.col("rest").is_null())
            .then(pl.col("text").str.strip_chars())
            .otherwise((pl.col("before") + after.fill_null("")).str.strip_chars()),
            open=pl.col("rest").is_not_null() & inside.is_null(),
        )
        columns = {config.into[0]: found["reasoning"].alias(config.into[0]), config.into[1]: found["answer"]}
        if config.unclosed == "keep":
            return Result(columns=columns)
        reason = pl.when("open").then(pl.lit("unclosed"))
        detail = pl.lit(f"no {config.close} after {config.open}")
        return Result(columns=columns, verdicts=verdicts_of(found, config.unclosed, reason, detail=detail))
