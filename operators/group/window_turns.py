"""window_turns: dialogues that are too long, in pieces that overlap."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import polars as pl
from pydantic import Field, model_validator

from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.replies import Reissue, stretches


class WindowTurnsConfig(OperatorConfig):
    """How long a window may be and how much of the one before it repeats."""

    max: int = Field(ge=1, description="longest window in `unit`")
    unit: Literal["token", "word", "turn"] = Field(
        "token",
        description="token: as stored, a system message counting with the first turn; word: runs between blanks",
    )
    overlap: int = Field(1, ge=0, description="turns of the window before that come again as context, and do not train")
    sampled: Literal["keep", "reject"] = Field(
        "keep", description="sampled rows that are too long: left as they are, or rejected (`too_long`)"
    )

    @model_validator(mode="after")
    def _windows_move_on(self) -> WindowTurnsConfig:
        if self.unit == "turn" and self.overlap >= self.max:
            raise ValueError(f"windows of {self.max} turns with {self.overlap} of the one before never move on")
        return self


class WindowTurns(Operator[WindowTurnsConfig]):
    """Replaces dialogues longer than `max` by windows of whole turns; each reply trains in exactly one of them.

    A turn is what ends with a reply. A window begins with the system message, if there is one, and up to `overlap`
    turns of the window before, fewer where they leave no room, as context whose replies do not train; then come as many
    new turns as fit. The windows are the turns 0, 1, 2 … of one new group; messages after the last reply go with the
    last window. The window is encoded anew, so this is for text that nobody sampled: the tokens of a sampled row were
    drawn with all that stood before, and other context makes them another policy's. Such rows are kept or rejected. In
    tokens the system message is counted by its upper bound, the first turn's prompt, and a dialogue without tokens, or
    with replies that do not train, cannot be measured and is kept. A dialogue in which one turn alone
    is too long is rejected (`turn_too_long`).
    """

    Config = WindowTurnsConfig

    def contract(self) -> Contract:
        """Reads the dialogue and its tokens; replaces rows."""
        reads = frozenset(("messages", "total_tokens", "loss_mask", "logprobs"))
        return Contract(reads=reads, drops=True, adds=True, cost="python")

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Cut every dialogue that is too long."""
        reissue = Reissue(frame, "replaced", f"windows of at most {self.config.max} {self.config.unit}s")
        # A Python loop over dialogues: where a window ends depends on where the one before did.
        for row, messages in enumerate(frame["messages"].to_list()):
            head, turns = _turns(messages)
            fixed, lengths = self._lengths(frame, row, head, turns)
            if not turns or fixed + sum(lengths) <= self.config.max:
                continue
            if frame["logprobs"][row] is not None:
                if self.config.sampled == "reject":
                    reissue.replace([row], "too_long")
            elif any(fixed + length > self.config.max for length in lengths):
                reissue.replace([row], "turn_too_long")
            else:
                reissue.replace([row])
                self._cut(reissue, row, head, turns, fixed, lengths)
        return reissue.result()

    def _lengths(self, frame: pl.DataFrame, row: int, head: list[Any], turns: list[list[Any]]) -> tuple[int, list[int]]:
        """Length of the head, and of each turn."""
        if not turns:
            return 0, []
        if self.config.unit == "turn":
            return 0, [1] * len(turns)
        if self.config.unit == "word":
            return _words(head), [_words(turn) for turn in turns]
        replies = stretches(frame["loss_mask"][row].to_list())[-len(turns) :]
        if len(replies) < len(turns):
            return 0, []  # no tokens, or replies that do not train: nothing to measure
        ends = [0, *(stop for _, stop in replies)]
        ends[-1] = frame["total_tokens"][row]
        return (replies[0][0] if head else 0), [stop - start for start, stop in pairwise(ends)]

    def _cut(
        self, reissue: Reissue, row: int, head: list[Any], turns: list[list[Any]], fixed: int, lengths: list[int]
    ) -> None:
        place = window = 0
        while place < len(turns):
            back = min(self.config.overlap, place)
            while back and fixed + sum(lengths[place - back : place + 1]) > self.config.max:
                back -= 1
            stop = place + 1
            while stop < len(turns) and fixed + sum(lengths[place - back : stop + 1]) <= self.config.max:
                stop += 1
            reissue.add(
                row,
                spans=None,
                messages=[*head, *(message for turn in turns[place - back : stop] for message in turn)],
                bundle=reissue.frame["experience_id"][row],
                sample=0,
                turn=window,
                context_replies=sum(m["role"] == "assistant" for turn in turns[place - back : place] for m in turn),
            )
            place, window = stop, window + 1


def _turns(messages: list[Any]) -> tuple[list[Any], list[list[Any]]]:
    """The system message, and the rest cut behind each reply; what follows the last reply belongs to it."""
    head = [message for message in messages[:1] if message["role"] == "system"]
    turns: list[list[Any]] = [[]]
    for message in messages[len(head) :]:
        if turns[-1] and turns[-1][-1]["role"] == "assistant":
            turns.append([])
        turns[-1].append(message)
    if len(turns) > 1 and turns[-1][-1]["role"] != "assistant":
        rest = turns.pop()
        turns[-1] += rest
    return head, [turn for turn in turns if turn]


def _words(messages: list[Any]) -> int:
    return sum(len((message["content"] or "").split()) for message in messages)
