"""fix_mojibake: text that was decoded with the wrong encoding."""

from __future__ import annotations

from typing import Any, ClassVar

import polars as pl

from buffer_engine.extras import require
from operators.base import Cost
from operators.mending import MendConfig, Mender

# What UTF-8 looks like when read as Latin-1, Windows-1252 or similar: a lead byte as a letter, then a byte 80–BF as
# whatever that encoding has there; the signs that encodings of Eastern Europe and Cyrillic give for lead bytes; and the
# replacement character's own mojibake.
_SUSPICIOUS = (
    r"[\u{c2}-\u{f4}\u{102}\u{10f}\u{159}\u{411}-\u{45f}\u{2019}]"
    r"[\u{80}-\u{bf}\u{152}\u{153}\u{160}\u{161}\u{178}\u{17d}\u{17e}\u{192}\u{2c6}\u{2dc}\u{2013}-\u{203a}"
    r"\u{20ac}\u{2122}\u{104}-\u{17c}\u{2c7}-\u{2dd}\u{402}-\u{45f}\u{ad}]"
)


class FixMojibakeConfig(MendConfig):
    """Only the columns."""


class FixMojibake(Mender[FixMojibakeConfig]):
    """Repairs text whose UTF-8 was read as another encoding (`schÃ¶n` → `schön`), with ftfy's encoding repair alone.

    Only texts with a pair of characters that such an error leaves are given to ftfy, and only what ftfy is sure of is
    changed: quotes, widths, entities and control characters are the business of `normalize_text`. Null stays null. With
    `rewrite: true` imported text rows are replaced (`replaced`), as by `normalize_text`.
    """

    Config = FixMojibakeConfig
    requires = (("ftfy", "text"),)
    cost: ClassVar[Cost] = "python"

    def mend(self, texts: pl.Series) -> pl.Series:
        """Repair the suspicious texts."""
        suspects = texts.str.contains(_SUSPICIOUS).fill_null(False)
        if not suspects.any():
            return texts.cast(pl.String)
        ftfy: Any = require("ftfy", "text")
        return texts.scatter(suspects.arg_true(), [ftfy.fix_encoding(text) for text in texts.filter(suspects)])
