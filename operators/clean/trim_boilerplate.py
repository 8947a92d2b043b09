"""trim_boilerplate: stock phrases and echoes around an answer."""

from __future__ import annotations

import polars as pl
from pydantic import Field, model_validator

from operators.base import Context, Contract, Result
from operators.expressions import Pattern
from operators.mending import MendConfig, Mender

_PREFIXES = (
    r"(?i:as an ai(?: language)?(?: model| assistant)?\b[^.!?\n]*[.!?,:]+)",
    r"(?i:i(?:'|’)?(?: a)?m (?:just |only )?an ai\b[^.!?\n]*[.!?,:]+)",
    r"(?i:(?:sure|certainly|of course|absolutely|great question)[!.,]+)",
    r"(?i:(?:here is|here's|here’s|here are) (?:the|an|a|your|my) [^.!?:\n]{0,60}:)",
    r"(?i:i(?:'|’)?(?: a)?m sorry, but\b[^.!?\n]*[.!?]+)",
    r"(?i:i apologi[sz]e\b[^.!?\n]*[.!?]+)",
    r"(?i:i (?:cannot|can(?:'|’)t|am unable to|am not able to) "
    r"(?:help|assist|provide|comply|fulfil|answer|support|engage|discuss|do (?:that|this))\b[^.!?\n]*[.!?]+)",
)
_SUFFIXES = (
    r"(?i:i hope (?:this|that) helps\b[^.!?\n]*[.!?]+)",
    r"(?i:(?:please )?(?:let me know|feel free to (?:ask|reach out))\b[^.!?\n]*[.!?]+)",
    r"(?i:is there anything else\b[^.!?\n]*[.!?]+)",
    r"(?i:if you have (?:any|more|further) (?:other )?questions\b[^.!?\n]*[.!?]+)",
)


class TrimBoilerplateConfig(MendConfig):
    """Which phrases go from the start and from the end."""

    columns: tuple[str, ...] = Field(("response",), min_length=1, description="text columns to trim")
    prefixes: tuple[Pattern, ...] = Field(
        _PREFIXES, description="regular expressions of what goes from the start, as often as one of them matches"
    )
    suffixes: tuple[Pattern, ...] = Field(
        _SUFFIXES, description="regular expressions of what goes from the end, as often as one of them matches"
    )
    echo: bool = Field(True, description="also remove the prompt from the start of a text that repeats it")

    @model_validator(mode="after")
    def _echo_fits(self) -> TrimBoilerplateConfig:
        if self.echo and self.rewrite:
            raise ValueError("echo looks at the last prompt only and cannot rewrite whole dialogues: set echo: false")
        if not (self.prefixes or self.suffixes or self.echo):
            raise ValueError("nothing to trim: give prefixes, suffixes or echo")
        return self


class TrimBoilerplate(Mender[TrimBoilerplateConfig]):
    """Trims an echoed prompt, then stock phrases at the start, then stock phrases at the end, and blanks around.

    A text echoes the prompt when it begins with the prompt, both without blanks around and the prompt not empty; the
    echo goes once. Phrases in the middle stay. Every match at an end goes, whichever pattern it is of, until none
    matches there. A text of nothing but phrases becomes empty: let a `length_filter` follow. Null stays null.
    """

    Config = TrimBoilerplateConfig

    def contract(self) -> Contract:
        """As every mender, and reads the prompt to find its echo."""
        base = super().contract()
        reads = base.reads | {"prompt"} if self.config.echo else base.reads
        return Contract(reads=reads, writes=base.writes, drops=base.drops, adds=base.adds)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Trim every column."""
        if not self.config.echo:
            return super().apply(frame, context)
        prompt = pl.col("prompt").fill_null("").str.strip_chars()
        columns: dict[str, pl.Series] = {}
        for name in dict.fromkeys(self.config.columns):
            text = pl.col(name).str.strip_chars()
            echoes = (prompt != "") & text.str.starts_with(prompt)
            rest = pl.when(echoes & (pl.lit(name) != "prompt")).then(text.str.strip_prefix(prompt)).otherwise(name)
            columns[name] = self.mend(frame.select(rest.alias(name)).to_series())
        return Result(columns=columns)

    def mend(self, texts: pl.Series) -> pl.Series:
        """Trim phrases and blanks from both ends."""
        text = pl.col("text").str.strip_chars()
        if self.config.prefixes:
            text = text.str.replace(rf"\A(?:\s*(?:{'|'.join(self.config.prefixes)}))+", "")
        if self.config.suffixes:
            text = text.str.replace(rf"(?:(?:{'|'.join(self.config.suffixes)})\s*)+\z", "")
        return texts.to_frame("text").select(text.str.strip_chars().alias(texts.name)).to_series()
