"""repetition_filter: texts that say the same again and again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

import polars as pl
from pydantic import Field

from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.ngrams import gram, words_of
from operators.verdicts import verdicts_of

_Share = Annotated[float, Field(ge=0, le=1)]
_Length = Annotated[int, Field(ge=1, le=32)]


class RepetitionFilterConfig(OperatorConfig):
    """The greatest shares that stay; the defaults are those of Gopher (arXiv 2112.11446, table A1)."""

    column: str = Field("response", description="text column")
    lines: _Share | None = Field(
        0.30, description="lines that repeat an earlier one, of all lines; null: not looked at"
    )
    line_chars: _Share | None = Field(0.20, description="characters in such lines, of those in all lines")
    paragraphs: _Share | None = Field(0.30, description="paragraphs that repeat an earlier one, of all paragraphs")
    paragraph_chars: _Share | None = Field(0.20, description="characters in such paragraphs")
    top_ngrams: Mapping[_Length, _Share] = Field(
        {2: 0.20, 3: 0.18, 4: 0.16},
        description="words in a run → characters in the most frequent run of that many words, of those in all words",
    )
    repeated_ngrams: Mapping[_Length, _Share] = Field(
        {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10},
        description="words in a run → characters in runs of that many words that occurred before",
    )
    min_words: int = Field(50, ge=0, description="texts with fewer words are not held against the rules on runs")


class RepetitionFilter(Operator[RepetitionFilterConfig]):
    """Rejects texts that repeat themselves, by Gopher's shares; limits stay in, and the first broken one is the reason.

    Lines and paragraphs (parted by blank lines) are compared without blanks around them; empty ones do not count. Words
    are what stands between blanks, so text without blanks is one word. Reasons: `lines`, `line_chars`, `paragraphs`,
    `paragraph_chars`; `top_2gram` for the run of words that occurs most often, twice at least (of several the one with
    the most characters); `repeated_5gram` for runs that occurred before, where a character that lies in several such
    runs counts once and the first occurrence not at all. A null text is rejected with reason `null`, an empty one has
    nothing that repeats.
    """

    Config = RepetitionFilterConfig

    def contract(self) -> Contract:
        """Reads the column; rejects."""
        return Contract(reads=frozenset((self.config.column,)), drops=True)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Measure every share and compare."""
        texts = frame.select(pl.col(self.config.column).cast(pl.String).alias("text"))
        shares = texts.with_row_index("row")
        limits: dict[str, float] = {}
        for name, limit, measured in (*self._parts(texts["text"]), *self._runs(texts["text"])):
            limits[name] = limit
            shares = shares.join(measured.rename({"share": name}), on="row", how="left", maintain_order="left")
        broken = {name: pl.col(name) > limit for name, limit in limits.items()}
        reason = pl.coalesce(
            pl.when(pl.col("text").is_null()).then(pl.lit("null")),
            *(pl.when(test).then(pl.lit(name)) for name, test in broken.items()),
        )
        detail = pl.coalesce(
            pl.lit(None, pl.String),
            *(
                pl.when(test).then(pl.format("share {} > {}", pl.col(name).round(4), pl.lit(limits[name])))
                for name, test in broken.items()
            ),
        )
        return Result(verdicts=verdicts_of(shares, "reject", reason, detail=detail))

    def _parts(self, texts: pl.Series) -> Iterator[tuple[str, float, pl.DataFrame]]:
        """Shares of repeated lines and paragraphs: name, limit, and (row, share)."""
        config = self.config
        lines = pl.col("text").str.split("\n")
        paragraphs = pl.col("text").str.replace_all(r"\n[ \t\r]*\n\s*", "\0").str.split("\0")
        for name, pieces, count, chars in (
            ("line", lines, config.lines, config.line_chars),
            ("paragraph", paragraphs, config.paragraphs, config.paragraph_chars),
        ):
            if count is None and chars is None:
                continue
            flat = (
                texts.to_frame()
                .select(row=pl.int_range(pl.len(), dtype=pl.UInt32), piece=pieces)
                .filter(pl.col("piece").list.len() > 0)
                .explode("piece")
                .with_columns(pl.col("piece").str.strip_chars())
                .filter(pl.col("piece") != "")
                .with_columns(
                    again=~pl.struct("row", "piece").is_first_distinct(), size=pl.col("piece").str.len_chars()
                )
            )
            per_row = flat.group_by("row").agg(
                pl.col("again").mean().alias(f"{name}s"),
                ((pl.col("size") * pl.col("again")).sum() / pl.col("size").sum()).alias(f"{name}_chars"),
            )
            for measure, limit in ((f"{name}s", count), (f"{name}_chars", chars)):
                if limit is not None:
                    yield measure, limit, per_row.select("row", share=measure)

    def _runs(self, texts: pl.Series) -> Iterator[tuple[str, float, pl.DataFrame]]:
        """Shares of frequent and of repeated runs of words: name, limit, and (row, share)."""
        enough = pl.len().over("row") >= self.config.min_words
        words = words_of(texts, r"\S+").filter(enough).with_columns(size=pl.col("word").str.len_chars())
        top, repeated = self.config.top_ngrams, self.config.repeated_ngrams
        found: dict[str, tuple[float, pl.DataFrame]] = {}
        for length in sorted({*top, *repeated}):
            runs = words.with_columns(run=gram(length))
            again = pl.col("run").is_not_null() & ~pl.struct("row", "run").is_first_distinct()
            runs = runs.with_columns(again=again)
            # A run of more words repeats only in texts in which one of fewer words does: others need no further look.
            looping = runs.filter("again")["row"].unique()
            runs = runs.filter(pl.col("row").is_in(looping.implode()))
            words = runs.select(words.columns)
            if length in top:
                found[f"top_{length}gram"] = top[length], _covered(runs, _most_frequent(runs), length)
            if length in repeated:
                found[f"repeated_{length}gram"] = repeated[length], _covered(runs, runs["again"], length)
        for name in [f"top_{n}gram" for n in sorted(top)] + [f"repeated_{n}gram" for n in sorted(repeated)]:
            yield name, *found[name]


def _most_frequent(runs: pl.DataFrame) -> pl.Series:
    """Where the run begins that occurs most often in its text, twice at least; of several the longest, then the first
    in the alphabet."""
    counted = (
        runs.filter(pl.col("run").is_not_null())
        .group_by("row", "run")
        .agg(count=pl.len())
        .filter(pl.col("count") > 1)
        .sort("row", "count", pl.col("run").str.len_chars(), "run", descending=[False, True, True, False])
        .unique("row", keep="first", maintain_order=True)
        .select("row", top="run")
    )
    marked = runs.join(counted, on="row", how="left", maintain_order="left")
    return marked.select((pl.col("run") == pl.col("top")).fill_null(False)).to_series()


def _covered(runs: pl.DataFrame, starts: pl.Series, length: int) -> pl.DataFrame:
    """Per row the share of characters in words that lie in a run of `length` words beginning where `starts` is true."""
    inside = starts.cast(pl.Int8).alias("inside")
    return (
        runs.with_columns(inside)
        .with_columns(pl.col("inside").rolling_max(length, min_samples=1).over("row"))
        .group_by("row")
        .agg(share=(pl.col("size") * pl.col("inside")).sum() / pl.col("size").sum())
    )
