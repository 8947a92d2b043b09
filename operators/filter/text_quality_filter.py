"""text_quality_filter: texts whose characters, words or lines are not those of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import polars as pl
from pydantic import Field

from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.verdicts import verdicts_of

Measure = Literal[
    "alnum", "digits", "uppercase", "special", "word_length", "line_length", "longest_line", "bullet_lines", "ellipses"
]
Limits = tuple[float | None, float | None]

PRESETS: Mapping[str, Mapping[Measure, Limits]] = {
    "web": {
        "alnum": (0.6, None), "uppercase": (None, 0.4), "special": (None, 0.1), "word_length": (3, 10),
        "bullet_lines": (None, 0.9), "ellipses": (None, 0.3),
    },
    "chat": {
        "alnum": (0.4, None), "uppercase": (None, 0.7), "special": (None, 0.25),
        "longest_line": (None, 20_000),
    },
    "code": {
        "alnum": (0.25, None), "special": (None, 0.5), "line_length": (None, 100), "longest_line": (None, 1000),
    },
}  # fmt: skip
"""Limits by kind of text. web follows Gopher (arXiv 2112.11446, A1.1), code the filters of The Stack; chat is looser,
so that formulas, lists and short answers stay."""


class TextQualityFilterConfig(OperatorConfig):
    """The kind of text, and limits of one's own."""

    column: str = Field("response", description="text column")
    preset: Literal["web", "chat", "code", "none"] = Field("chat", description="limits to begin with")
    limits: Mapping[Measure, Limits] = Field(
        {},
        description="measure → [least, greatest], null: unlimited; in place of the preset's. alnum, digits, special: "
        "share of the characters that are no blanks; uppercase: of the letters; word_length, line_length: mean number "
        "of characters; longest_line: characters; bullet_lines, ellipses: share of lines that begin or end so",
    )


class TextQualityFilter(Operator[TextQualityFilterConfig]):
    """Rejects texts with a measure out of its limits, both of which stay in; the first broken one gives the reason.

    Reasons: `low_alnum`, `high_special` and so on, in the order of the measures above; detail is the value and the
    limit. Letters and digits are those of Unicode; special is what is neither letter, mark, digit, punctuation nor
    blank, such as symbols and emoji. Empty lines do not count. A measure without anything to measure (no letters, say)
    breaks no limit. Null is rejected as `null`, text of nothing but blanks as `empty`.
    """

    Config = TextQualityFilterConfig

    def contract(self) -> Contract:
        """Reads the column; rejects."""
        return Contract(reads=frozenset((self.config.column,)), drops=True)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Measure every text and compare."""
        limits = {**PRESETS.get(self.config.preset, {}), **self.config.limits}
        text = pl.col(self.config.column)
        measured = frame.select(text=text, **{name: _measure(name, text) for name in _ORDER if name in limits})
        reasons: list[pl.Expr] = [
            pl.when(pl.col("text").is_null()).then(pl.lit("null")),
            pl.when(pl.col("text").str.strip_chars() == "").then(pl.lit("empty")),
        ]
        details: list[pl.Expr] = [pl.lit(None, pl.String)]
        for name in _ORDER:
            low, high = limits.get(name, (None, None))
            value = pl.col(name)
            for limit, broken, word, sign in (
                (low, value < low if low is not None else None, "low", "<"),
                (high, value > high if high is not None else None, "high", ">"),
            ):
                if broken is not None:
                    reasons.append(pl.when(broken).then(pl.lit(f"{word}_{name}")))
                    shown = pl.format("{} {} {}", value.round(4), pl.lit(sign), pl.lit(f"{limit:g}"))
                    details.append(pl.when(broken).then(shown))
        return Result(
            verdicts=verdicts_of(measured, "reject", pl.coalesce(reasons), detail=pl.coalesce(details)),
        )


_ORDER: tuple[Measure, ...] = (
    "alnum", "digits", "uppercase", "special", "word_length", "line_length", "longest_line", "bullet_lines", "ellipses"
)  # fmt: skip


def _measure(name: Measure, text: pl.Expr) -> pl.Expr:
    """One number a text; null where there is nothing to measure."""
    filled = text.str.count_matches(r"\S")
    if name == "alnum":
        return _share(text.str.count_matches(r"[\p{L}\p{N}]"), filled)
    if name == "digits":
        return _share(text.str.count_matches(r"\p{N}"), filled)
    if name == "special":
        return _share(text.str.count_matches(r"[^\p{L}\p{M}\p{N}\p{P}\s+<=>^`|~$]"), filled)
    if name == "uppercase":
        return _share(text.str.count_matches(r"\p{Lu}"), text.str.count_matches(r"\p{L}"))
    if name == "word_length":
        return _share(filled, text.str.count_matches(r"\S+"))
    lines = text.str.split("\n").list.eval(pl.element().str.strip_chars()).list.eval(
        pl.element().filter(pl.element() != "")
    )  # fmt: skip
    lengths = lines.list.eval(pl.element().str.len_chars())
    if name == "line_length":
        return lengths.list.mean()
    if name == "longest_line":
        return lengths.list.max().cast(pl.Float64)
    pattern = r"^[-*•‣◦+]\s" if name == "bullet_lines" else r"(?:\.\.\.|…)$"
    return _share(lines.list.eval(pl.element().str.contains(pattern)).list.sum(), lines.list.len())


def _share(part: pl.Expr, whole: pl.Expr) -> pl.Expr:
    return pl.when(whole > 0).then(part / whole)
