"""normalize_text: one spelling for equal-looking text."""

from __future__ import annotations

from functools import reduce
from typing import Literal

import polars as pl
from pydantic import Field

from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.verdicts import verdicts_of

Form = Literal["nfc", "nfkc", "ctrl", "punct", "ws"]
TextColumn = Literal["prompt", "response"]

_PUNCTUATION = {
    "\u2018": "'", "\u2019": "'", "\u201a": "'", "\u201b": "'", "\u2032": "'", "\u201c": '"', "\u201d": '"',
    "\u201e": '"', "\u201f": '"', "\u2033": '"', "\u00ab": '"', "\u00bb": '"', "\u2010": "-", "\u2011": "-",
    "\u2012": "-", "\u2013": "-", "\u2014": "-", "\u2015": "-", "\u2212": "-", "\u2026": "...", "\u3001": ",",
    "\u3002": ".", "\uff0c": ",", "\uff0e": ".", "\uff1a": ":", "\uff1b": ";", "\uff01": "!", "\uff1f": "?",
    "\uff08": "(", "\uff09": ")",
}  # fmt: skip
_BLANKS = r"[\t\u{a0}\u{1680}\u{2000}-\u{200a}\u{202f}\u{205f}\u{3000} ]+"
_CONTROLS = r"[\p{Cc}\u{200b}-\u{200f}\u{202a}-\u{202e}\u{2060}-\u{2064}\u{feff}&&[^\n\t\r]]"
_ROLES: dict[TextColumn, tuple[str, ...]] = {"prompt": ("system", "user"), "response": ("assistant",)}


class NormalizeTextConfig(OperatorConfig):
    """Which columns are normalised, and how."""

    columns: tuple[TextColumn, ...] = Field(("prompt", "response"), min_length=1, description="text columns to mend")
    forms: tuple[Form, ...] = Field(
        ("nfc", "ctrl", "ws"),
        min_length=1,
        description="in this order: nfc/nfkc Unicode form, ctrl removes control and zero-width characters, punct makes "
        "quotes, dashes and full-width marks ASCII, ws unifies blanks and line ends and trims",
    )
    rewrite: bool = Field(
        False, description="also replace imported text rows by rows with mended messages; sampled rows never change"
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


class NormalizeText(Operator[NormalizeTextConfig]):
    """Normalises `prompt` and `response` for the operators after it; what is stored stays as it was.

    With `rewrite: true`, an imported dialogue that nobody sampled (made_by = import, no log-probs) and whose messages
    change is rejected with reason `replaced`, and a new row with the mended messages takes its place. `prompt` means
    system and user messages, `response` assistant messages; tool messages are never touched. Rows that are normal
    already are kept. Sampled rows are never rewritten: their tokens are what the model produced.
    """

    Config = NormalizeTextConfig

    def contract(self) -> Contract:
        """Reads and writes the configured columns; with `rewrite` also reads messages, drops and adds."""
        rewrite = self.config.rewrite
        extra = ("messages", "made_by", "mean_logprob") if rewrite else ()
        return Contract(
            reads=frozenset((*self.config.columns, *extra)),
            writes={name: pl.String() for name in dict.fromkeys(self.config.columns)},
            drops=rewrite,
            adds=rewrite,
        )

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Mend the columns and, with `rewrite`, the messages of imported rows."""
        mended = frame.select(
            normalized(pl.col(name), self.config.forms) for name in dict.fromkeys(self.config.columns)
        )
        columns = {series.name: series for series in mended}
        if not self.config.rewrite:
            return Result(columns=columns)
        messages = self._mended_messages(frame)
        changes = pl.DataFrame({"old": frame["messages"], "new": messages}).select(
            changed=(pl.col("old") != pl.col("new")) & (frame["made_by"] == "import") & frame["mean_logprob"].is_null()
        )["changed"]
        rows = changes.fill_null(False).arg_true()
        return Result(
            columns=columns,
            verdicts=verdicts_of(
                frame.select(changed=changes.fill_null(False)),
                "reject",
                pl.when("changed").then(pl.lit("replaced")),
                detail=pl.lit(f"text normalised: {', '.join(self.config.forms)}"),
            ),
            added=pl.DataFrame({"parent": rows.cast(pl.UInt32), "messages": messages.gather(rows)}),
        )

    def _mended_messages(self, frame: pl.DataFrame) -> pl.Series:
        roles = [role for name in self.config.columns for role in _ROLES[name]]
        content = pl.element().struct.field("content")
        mended = (
            pl.when(pl.element().struct.field("role").is_in(roles))
            .then(normalized(content, self.config.forms))
            .otherwise(content)
        )
        return frame.select(pl.col("messages").list.eval(pl.element().struct.with_fields(content=mended))).to_series()
