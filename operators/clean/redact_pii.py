"""redact_pii: personal data and secrets out of texts."""

from __future__ import annotations

import hashlib
from typing import ClassVar, Literal

import polars as pl
from pydantic import Field, model_validator

from operators.base import Context, Contract, Cost, Result, ScoreOperatorConfig
from operators.clean.pii import PII, PiiKind
from operators.mending import MendConfig, Mender
from operators.verdicts import verdicts_of

_DEFAULT: tuple[PiiKind, ...] = ("private_key", "token", "password", "email", "iban", "card", "ip", "phone")

_Piece = tuple[str, PiiKind | None]


class RedactPiiConfig(MendConfig, ScoreOperatorConfig):
    """What is looked for, and what becomes of it."""

    weight: float = Field(0.0, description="share of the count in the reward; 0 makes it a metric only")
    types: tuple[PiiKind, ...] = Field(
        _DEFAULT,
        min_length=1,
        description="private_key: PEM blocks; token: keys of known services and JWTs; password: random-looking values "
        "after a name like api_key; email; iban and card: with right check digits; ip; phone; path: the user's name in "
        "a home folder",
    )
    mode: Literal["mask", "hash", "drop"] = Field(
        "mask",
        description="mask: [EMAIL]; hash: [EMAIL:1f0c9a2b], equal values alike; drop: reject rows that hold any",
    )
    salt: str = Field("", description="secret that enters the hashes of mode hash; without it they can be guessed")
    counts: bool = Field(False, description="also write one metric a type, named like redact_pii_email")

    @model_validator(mode="after")
    def _mode_fits(self) -> RedactPiiConfig:
        if self.mode == "hash" and not self.salt:
            raise ValueError("mode hash needs a salt: a telephone number is found again by trying them all")
        if self.mode == "drop" and self.rewrite:
            raise ValueError("mode drop rejects rows and rewrites none: set rewrite: false")
        return self


class RedactPii(Mender[RedactPiiConfig]):
    """Puts a typed placeholder in the place of personal data and secrets, and scores how many there were.

    Types are looked for in the order private_key, token, password, email, iban, card, ip, phone, path, and what one has
    taken the next does not see. Card numbers must pass the Luhn check and IBANs their length and remainder; loopback
    addresses, dates and low-entropy values are no finds. Names of people are not looked for. Columns change for the
    operators after it; sampled rows stay as they are stored, so `mode: drop` (reason `pii`) is the only way to keep a
    model from training on what it wrote itself. The score is the number of finds in the configured columns; null text
    holds none.
    """

    Config = RedactPiiConfig
    cost: ClassVar[Cost] = "python"

    def contract(self) -> Contract:
        """As every mender; scores the count, and one metric a type with `counts`."""
        base = super().contract()
        drop = self.config.mode == "drop"
        parts = tuple(f"{self.config.name}_{kind}" for kind in self._types()) if self.config.counts else ()
        return Contract(
            reads=base.reads,
            writes={} if drop else base.writes,
            scores=(self.config.name, *parts),
            drops=drop or base.drops,
            adds=base.adds,
            cost="python",
        )

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Redact every column and count."""
        counts = {kind: [0] * frame.height for kind in self._types()}
        columns: dict[str, pl.Series] = {}
        for name in dict.fromkeys(self.config.columns):
            columns[name], found = self._redacted(frame[name])
            for row, kind in found:
                counts[kind][row] += 1
        per_type = pl.DataFrame({kind: pl.Series(values, dtype=pl.Float64) for kind, values in counts.items()})
        total = per_type.select(pl.sum_horizontal(pl.all()).alias(self.config.name)).to_series()
        scores = {self.config.name: total}
        if self.config.counts:
            scores |= {f"{self.config.name}_{kind}": per_type[kind] for kind in self._types()}
        if self.config.mode == "drop":
            listed = pl.concat_str(
                [pl.when(pl.col(k) > 0).then(pl.format("{} {}", pl.col(k).cast(pl.Int64), pl.lit(k))) for k in counts],
                separator=", ",
                ignore_nulls=True,
            )
            holds = pl.when(pl.sum_horizontal(pl.all()) > 0).then(pl.lit("pii"))
            return Result(scores=scores, verdicts=verdicts_of(per_type, "reject", holds, detail=listed))
        if not self.config.rewrite:
            return Result(columns=columns, scores=scores)
        changed = self.rewritten(frame, columns)
        return Result(columns=columns, scores=scores, verdicts=changed.verdicts, added=changed.added)

    def mend(self, texts: pl.Series) -> pl.Series:
        """Redact every text."""
        return self._redacted(texts)[0]

    def _types(self) -> tuple[PiiKind, ...]:
        return tuple(kind for kind in PII if kind in self.config.types)

    def _redacted(self, texts: pl.Series) -> tuple[pl.Series, list[tuple[int, PiiKind]]]:
        """The texts without what was found, and (row, type) of every find."""
        hints = pl.any_horizontal(pl.col("text").str.contains(PII[kind].hint) for kind in self._types())
        rows = texts.alias("text").to_frame().select(hints.fill_null(False)).to_series().arg_true()
        found: list[tuple[int, PiiKind]] = []
        changed: list[str] = []
        # A Python loop over the few texts that may hold something: check digits are not a matter of patterns.
        for row, text in zip(rows, texts.gather(rows), strict=True):
            mended, kinds = self._redact(text)
            changed.append(mended)
            found.extend((row, kind) for kind in kinds)
        return (texts.scatter(rows, changed) if changed else texts.cast(pl.String)), found

    def _redact(self, text: str) -> tuple[str, list[PiiKind]]:
        pieces: list[_Piece] = [(text, None)]
        for kind in self._types():
            pieces = [part for piece in pieces for part in ([piece] if piece[1] else _cut(piece[0], kind))]
        mended = "".join(self._placeholder(piece, owner) if owner else piece for piece, owner in pieces)
        return mended, [owner for _, owner in pieces if owner]

    def _placeholder(self, value: str, kind: PiiKind) -> str:
        if self.config.mode != "hash":
            return f"[{kind.upper()}]"
        key = self.config.salt.encode()[:64]
        return f"[{kind.upper()}:{hashlib.blake2b(value.encode(), key=key, digest_size=4).hexdigest()}]"


def _cut(text: str, kind: PiiKind) -> list[_Piece]:
    """`text` in pieces: what is of this kind, and what lies between."""
    rule = PII[kind]
    pieces: list[_Piece] = []
    place = 0
    for match in rule.pattern.finditer(text):
        group = "value" if "value" in rule.pattern.groupindex else 0
        if rule.holds(match[group]):
            pieces.append((text[place : match.start(group)], None))
            pieces.append((match[group], kind))
            place = match.end(group)
    pieces.append((text[place:], None))
    return pieces
