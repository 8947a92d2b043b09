"""normalize_text: one spelling for equal-looking text."""

from __future__ import annotations

from functools import reduce
from typing import Literal

import polars as pl
from pydantic import Field

from operators.mending import MendConfig, Mender

Form = Literal["nfc", "nfkc", "ctrl", "punct", "ws"]

_PUNCTUATION = {
    "\u2018": "'", "\u2019": "'", "\u201a": "'", "\u201b": "'", "\u2032": "'", "\u201c": '"', "\u201d": '"',
    "\u201e": '"', "\u201f": '"', "\u2033": '"', "\u00ab": '"', "\u00bb": '"', "\u2010": "-", "\u2011": "-",
    "\u2012": "-", "\u2013": "-", "\u2014": "-", "\u2015": "-", "\u2212": "-", "\u2026": "...", "\u3001": ",",
    "\u3002": ".", "\uff0c": ",", "\uff0e": ".", "\uff1a": ":", "\uff1b": ";", "\uff01": "!", "\uff1f": "?",
    "\uff08": "(", "\uff09": ")",
}  # fmt: skip
_BLANKS = r"[\t\u{a0}\u{1680}\u{2000}-\u{200a}\u{202f}\u{205f}\u{3000} ]+"
_CONTROLS = r"[\p{Cc}\u{200b}-\u{200f}\u{202a}-\u{202e}\u{2060}-\u{2064}\u{feff}&&[^\n\t\r]]"


class NormalizeTextConfig(MendConfig):
    """Which columns are normalised, and how."""

    forms: tuple[Form, ...] = Field(
        ("nfc", "ctrl", "ws"),
        min_length=1,
        description="in this order: nfc/nfkc Unicode form, ctrl removes control and zero-width characters, punct makes "
        "quotes, dashes and full-width marks ASCII, ws unifies blanks and line ends and trims",
    )


def normalized(text: pl.Expr, forms: tuple[Form, ...]) -> pl.Expr:
    """`text` after every form, left to right; null stays null."""
    return reduce(_apply, forms, text)


def _apply(text: pl.Expr, form: Form) -> pl.Expr:
    if form == "nfc":
        return text.str.normalize("NFC")
    if form == "nfkc":
        return text.str.normalize("NFKC")
    if form == "ctrl":
        return text.str.replace_all(_CONTROLS, "")
    if form == "punct":
        return text.str.replace_many(_PUNCTUATION)
    lines = text.str.replace_all(r"\r\n?", "\n").str.replace_all(_BLANKS, " ")
    return lines.str.replace_all(r" ?\n ?", "\n").str.strip_chars()


class NormalizeText(Mender[NormalizeTextConfig]):
    """Normalises `prompt` and `response` for the operators after it; what is stored stays as it was.

    With `rewrite: true`, an imported dialogue that nobody sampled (made_by = import, no log-probs) and whose messages
    change is rejected with reason `replaced`, and a new row with the mended messages takes its place. `prompt` means
    system and user messages, `response` assistant messages; tool messages are never touched. Rows that are normal
    already are kept. Sampled rows are never rewritten: their tokens are what the model produced.
    """

    Config = NormalizeTextConfig

    def mend(self, texts: pl.Series) -> pl.Series:
        """Apply every form, left to right."""
        return texts.to_frame("text").select(normalized(pl.col("text"), self.config.forms)).to_series()
