"""decontaminate: rows that share long runs of words with a benchmark."""

from __future__ import annotations

from pathlib import Path

import polars as pl
from pydantic import Field, model_validator

from buffer_engine.config import ComponentConfig
from buffer_engine.errors import OperatorError
from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.ngrams import gram, words_of
from operators.table_files import read_table
from operators.verdicts import verdicts_of

_WORD = r"[\p{L}\p{N}]+"


class Benchmark(ComponentConfig):
    """A file with the texts that must not be trained on."""

    path: str = Field(description="Parquet, CSV or JSON Lines file")
    column: str = Field("question", description="column with the text")
    id: str | None = Field(None, description="column with the items' names; default: the 0-based row number")


class DecontaminateConfig(OperatorConfig):
    """What is compared with what."""

    benchmarks: tuple[Benchmark, ...] = Field(min_length=1, description="files to keep apart from")
    columns: tuple[str, ...] = Field(("prompt",), min_length=1, description="text columns that are compared")
    n: int = Field(13, ge=1, description="words in a run that two texts must share")
    min_words: int = Field(
        8, ge=1, description="an item with fewer than n words is one run of all its words, if it has this many"
    )
    min_hits: int = Field(1, ge=1, description="distinct shared runs from which on a row counts as contaminated")

    @model_validator(mode="after")
    def _lengths_fit(self) -> DecontaminateConfig:
        if self.min_words > self.n:
            raise ValueError(f"min_words {self.min_words} is greater than n {self.n}")
        return self


class Decontaminate(Operator[DecontaminateConfig]):
    """Rejects rows that share runs of words with an item of a benchmark (`contaminated`), which is the reference.

    Words are runs of letters and digits, without case (n-gram overlap of GPT-3, arXiv 2005.14165, appendix C). The
    reference is `file name:item id` of the item with the most distinct shared runs; of several the first in the order
    of files and lines. The detail counts them. Items with fewer than `min_words` words match nothing; a benchmark in
    which no item has enough stops the pass. Null texts share nothing. Files count in the operator's fingerprint.
    """

    Config = DecontaminateConfig

    def __init__(self, config: DecontaminateConfig) -> None:
        super().__init__(config)
        self._known: dict[int, pl.DataFrame] | None = None

    def contract(self) -> Contract:
        """Reads the columns; rejects."""
        return Contract(reads=frozenset(self.config.columns), drops=True, cost="python")

    def files(self) -> tuple[Path, ...]:
        """The benchmarks."""
        return tuple(Path(one.path).expanduser() for one in self.config.benchmarks)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Look up the runs of every row."""
        if self._known is None:
            self._known = self._load()
        hits: list[pl.DataFrame] = []
        for name in dict.fromkeys(self.config.columns):
            words = words_of(frame[name], _WORD, lower=True)
            for length, items in self._known.items():
                runs = words.select("row", run=gram(length)).filter(pl.col("run").is_not_null()).unique()
                hits.append(runs.join(items, on="run", how="inner").select("row", "run", "item", "name"))
        found = (
            pl.concat(hits)
            .unique(["row", "run", "item"])
            .group_by("row", "item", "name")
            .agg(count=pl.len())
            .filter(pl.col("count") >= self.config.min_hits)
            .sort("row", "count", "item", descending=[False, True, False])
            .unique("row", keep="first", maintain_order=True)
        )
        rows = frame.select(row=pl.int_range(pl.len(), dtype=pl.UInt32)).join(
            found, on="row", how="left", maintain_order="left"
        )
        return Result(
            verdicts=verdicts_of(
                rows,
                "reject",
                pl.when(pl.col("count").is_not_null()).then(pl.lit("contaminated")),
                detail=pl.format("{} shared runs of words", pl.col("count")),
                ref_id=pl.col("name"),
            )
        )

    def _load(self) -> dict[int, pl.DataFrame]:
        """Length of runs → (run, item, name) of the benchmarks."""
        items: list[pl.DataFrame] = []
        for benchmark, file in zip(self.config.benchmarks, self.files(), strict=True):
            columns = (benchmark.column, *(() if benchmark.id is None else (benchmark.id,)))
            table = read_table(file, columns=columns, operator=self.config.name)
            names = pl.col(benchmark.id).cast(pl.String) if benchmark.id else pl.int_range(pl.len()).cast(pl.String)
            items.append(
                table.select(text=pl.col(benchmark.column).cast(pl.String), name=pl.lit(f"{file.name}:") + names)
            )
        table = pl.concat(items)
        words = words_of(table["text"], _WORD, lower=True).with_columns(count=pl.len().over("row"))
        runs: dict[int, pl.DataFrame] = {}
        for length in range(self.config.min_words, self.config.n + 1):
            of_length = words if length == self.config.n else words.filter(pl.col("count") == length)
            found = of_length.select(item="row", run=gram(length)).filter(pl.col("run").is_not_null()).unique()
            if found.height:
                named = table.select("name").with_row_index("item")
                runs[length] = found.join(named, on="item", how="left")
        if not runs:
            raise OperatorError(
                f"operator {self.config.name!r}: no item of the benchmarks has {self.config.min_words} words, so none "
                "could ever be found: lower min_words, or name another column"
            )
        return runs
