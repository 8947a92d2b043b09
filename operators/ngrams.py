"""Words and runs of words of many texts at once, in long form: one line a word."""

from __future__ import annotations

import polars as pl


def words_of(texts: pl.Series, pattern: str, *, lower: bool = False) -> pl.DataFrame:
    """The words of every text.

    Args:
        texts: String; null and empty texts have no words.
        pattern: regular expression of a word.
        lower: whether letters lose their case first.
    Returns:
        One line per word, in order: row (UInt32 index into `texts`), place (0-based within its text), word.
    """
    text = pl.col("text").str.to_lowercase() if lower else pl.col("text")
    found = texts.alias("text").to_frame().select(
        row=pl.int_range(pl.len(), dtype=pl.UInt32), word=text.cast(pl.String).str.extract_all(pattern)
    )  # fmt: skip
    flat = found.filter(pl.col("word").list.len() > 0).explode("word")
    return flat.with_columns(place=pl.int_range(pl.len(), dtype=pl.UInt32).over("row"))


def gram(length: int) -> pl.Expr:
    """The run of `length` words that begins at each line of `words_of`, parted by blanks; null where too few are left.

    Over lines in order; a run never reaches into the next text.
    """
    runs = pl.concat_str([pl.col("word").shift(-step) for step in range(length)], separator=" ")
    return pl.when(pl.col("row").shift(1 - length) == pl.col("row")).then(runs)
