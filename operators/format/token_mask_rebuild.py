"""token_mask_rebuild: which replies of a dialogue train."""

from __future__ import annotations

from typing import Literal

import polars as pl
from pydantic import Field, model_validator

from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.replies import Reissue, episodes, size_of, span, stretches
from operators.verdicts import verdicts_of


class TokenMaskRebuildConfig(OperatorConfig):
    """What stays in the loss."""

    last_replies: int | None = Field(
        None, ge=1, description="only so many of the last replies train; null: all that do"
    )
    truncated: Literal["keep", "mask", "reject"] = Field(
        "keep", description="rows that a limit cut: as others, out of the loss (DAPO's overlong filtering), or rejected"
    )

    @model_validator(mode="after")
    def _does_something(self) -> TokenMaskRebuildConfig:
        if self.last_replies is None and self.truncated == "keep":
            raise ValueError("nothing to do: give last_replies, or truncated: mask or reject")
        return self


class TokenMaskRebuild(Operator[TokenMaskRebuildConfig]):
    """Takes replies out of the loss: all but the last few of a dialogue, and whole rows that a limit cut off.

    A reply is an unbroken run of trained tokens. Masks are stored and never change, so when rows of a group have more
    replies than `last_replies`, the whole group is replaced (`replaced`) by a new one with the same tokens and other
    masks; earlier replies are context there. Tokens that did not train before never begin to. Rows without tokens have
    nothing to mask. `truncated: mask` masks (`truncated`), `reject` rejects cut rows (`truncated`); a cut row that is
    replaced is judged when the new one is curated.
    """

    Config = TokenMaskRebuildConfig

    def contract(self) -> Contract:
        """Reads tokens and places; needs whole groups; replaces, masks or rejects."""
        rebuild = self.config.last_replies is not None
        places = ("messages", "total_tokens", "loss_mask", "sample_index", "attempt", "turn_index", "group_size")
        return Contract(
            reads=frozenset(("truncated", *(places if rebuild else ()))),
            scope="group",
            drops=rebuild or self.config.truncated == "reject",
            masks=self.config.truncated == "mask",
            adds=rebuild,
            cost="python",
        )

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Rebuild the groups that need it and judge cut rows of the others."""
        replaced = None if self.config.last_replies is None else self._rebuilt(frame, self.config.last_replies)
        if self.config.truncated == "keep":
            return replaced or Result()
        gone = [] if replaced is None or replaced.verdicts is None else replaced.verdicts["row"].to_list()
        cut = frame.select(cut=pl.col("truncated") & ~pl.int_range(pl.len()).is_in(gone))
        said = verdicts_of(cut, self.config.truncated, pl.when("cut").then(pl.lit("truncated")))
        if replaced is None or replaced.verdicts is None:
            return Result(verdicts=said)
        return Result(verdicts=pl.concat([replaced.verdicts, said]), added=replaced.added)

    def _rebuilt(self, frame: pl.DataFrame, last: int) -> Result:
        reissue = Reissue(frame, "replaced", f"only the last {last} replies train")
        masks = frame["loss_mask"].to_list()
        # A Python loop: runs of a mask are found row by row.
        for group in episodes(frame):
            rows = [row for episode in group for row in episode]
            replies = {row: stretches(masks[row]) for row in rows}
            if all(len(found) <= last for found in replies.values()):
                continue
            reissue.replace(rows)
            bundle, size = frame["group_id"][rows[0]], size_of(frame, group)
            for sample, episode in enumerate(group):
                for turn, row in enumerate(episode):
                    found = replies[row]
                    if len(found) <= last:
                        reissue.again(row, bundle=bundle, sample=sample, turn=turn, group_size=size)
                        continue
                    start = found[-last][0]
                    spans = [span(row, 0, start, trained=False), span(row, start, len(masks[row]))]
                    reissue.add(
                        row, spans=spans, messages=frame["messages"][row], bundle=bundle, sample=sample, turn=turn,
                        group_size=size,
                    )  # fmt: skip
        return reissue.result()
