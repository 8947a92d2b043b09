"""truncated_mask: rows cut by a limit stay in their group but do not train."""

from __future__ import annotations

import polars as pl

from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.verdicts import verdicts_of


class TruncatedMaskConfig(OperatorConfig):
    """Nothing to set."""


class TruncatedMask(Operator[TruncatedMaskConfig]):
    """Masks rows that a limit cut off (`truncated`), with the stop reason as detail.

    A masked row is kept: its reward counts in the group's baseline, its tokens do not count in the loss. This is the
    overlong filtering of DAPO (arXiv 2503.14476, section 3.4).
    """

    Config = TruncatedMaskConfig

    def contract(self) -> Contract:
        """Reads truncated and stop_reason; masks."""
        return Contract(reads=frozenset(("truncated", "stop_reason")), masks=True)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Mask where `truncated` is true."""
        reason = pl.when(pl.col("truncated")).then(pl.lit("truncated"))
        return Result(verdicts=verdicts_of(frame, "mask", reason, detail=pl.col("stop_reason")))
