"""semantic_dedup: rows that say the same in other words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from pydantic import Field

from operators.base import Context, Contract, Operator, Result
from operators.dedup.keeping import KeepingConfig
from operators.dedup.preference import by_preference, scopes_of
from operators.dedup.static_embeddings import StaticEmbeddings, Vectors
from operators.verdicts import verdicts_of

_DIGITS = 6
"""Similarities are rounded, so that the order in which a processor adds does not decide about a row."""


class SemanticDedupConfig(KeepingConfig):
    """How alike is too alike, by which model, and which row stays."""

    model: str = Field(description="folder of a static model as model2vec saves it: tokenizer.json, model.safetensors")
    column: str = Field("prompt", description="text column")
    threshold: float = Field(0.9, gt=0, le=1, description="cosine similarity from which on two texts are the same")


class SemanticDedup(Operator[SemanticDedupConfig]):
    """Rejects rows whose meaning is that of a row that stays (`same_meaning`, with that row as reference).

    The meaning of a text is the mean vector of its tokens in a static model, so the order of words does not count: use
    a high threshold, and look at what goes. Every pair is compared, none is missed. Rows are looked at in order of
    preference and compared with rows that stay only; the reference is the most similar one. Rows that earlier passes
    kept win over new ones. Null, and texts without a token that the model knows, are like nothing. The model's files
    count in the operator's fingerprint.
    """

    Config = SemanticDedupConfig
    requires = (("tokenizers", "embed"), ("safetensors", "embed"))

    def __init__(self, config: SemanticDedupConfig) -> None:
        super().__init__(config)
        self._model: StaticEmbeddings | None = None
        self._past: dict[str, tuple[tuple[Any, ...], Vectors]] = {}

    def contract(self) -> Contract:
        """Reads what is compared and what decides who stays; needs the whole frame; rejects."""
        extra = () if self.config.by is None else (self.config.by,)
        reads = frozenset((self.config.column, *self.config.scope, *extra, "sample_index"))
        return Contract(reads=reads, scope="frame", drops=True, cost="python")

    def files(self) -> tuple[Path, ...]:
        """The model."""
        folder = Path(self.config.model).expanduser()
        return folder / "model.safetensors", folder / "tokenizer.json"

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Compare every row with those that stay."""
        if not frame.height:
            return Result()
        vectors, scopes, ids = self._vectors(frame), scopes_of(frame, self.config.scope), frame["experience_id"]
        order = by_preference(frame, self.config.by)
        past = self._history(context) if self.config.history else {}
        found: dict[int, tuple[float, str]] = {}
        for scope in dict.fromkeys(scopes):
            old = [(name, vector) for name, (where, vector) in past.items() if where == scope]
            names = [name for name, _ in old]
            stays = [vector for _, vector in old]
            # A Python loop: whether a row stays depends on the rows before it.
            for row in order:
                if scopes[row] != scope or not vectors[row].any():
                    continue
                alike = np.round(np.array(stays) @ vectors[row], _DIGITS) if stays else np.zeros(0)
                best = float(alike.max(initial=-1.0))
                if best >= self.config.threshold:
                    found[row] = best, min(name for name, one in zip(names, alike, strict=True) if one == best)
                else:
                    names.append(ids[row])
                    stays.append(vectors[row])
        rows = frame.select(
            pl.Series("ref", [found[row][1] if row in found else None for row in range(frame.height)], pl.String),
            pl.Series("like", [found[row][0] if row in found else None for row in range(frame.height)], pl.Float64),
        )
        reason = pl.when(pl.col("ref").is_not_null()).then(pl.lit("same_meaning"))
        detail = pl.format("similarity {}", pl.col("like").round(4))
        return Result(verdicts=verdicts_of(rows, "reject", reason, detail=detail, ref_id=pl.col("ref")))

    def _vectors(self, frame: pl.DataFrame) -> Vectors:
        if self._model is None:
            self._model = StaticEmbeddings(Path(self.config.model).expanduser())
        return self._model.unit_vectors(frame[self.config.column].cast(pl.String).fill_null("").to_list())

    def _history(self, context: Context) -> dict[str, tuple[tuple[Any, ...], Vectors]]:
        """Scope and vector of what earlier passes kept; a row's are computed once."""
        past = context.history(list(dict.fromkeys((self.config.column, *self.config.scope)))).sort("experience_id")
        new = past.filter(~pl.col("experience_id").is_in(list(self._past)))
        if new.height:
            made = zip(scopes_of(new, self.config.scope), self._vectors(new), strict=True)
            self._past |= dict(zip(new["experience_id"], made, strict=True))
        known = set(past["experience_id"])
        return {name: one for name, one in sorted(self._past.items()) if name in known and one[1].any()}
