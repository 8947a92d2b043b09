"""regroup_turns: rows of single turns into rows of whole episodes, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import polars as pl
from pydantic import Field

from operators.base import Context, Contract, Operator, OperatorConfig, Result, RowError
from operators.replies import Reissue, Span, episodes, size_of, span, stretches


class RegroupTurnsConfig(OperatorConfig):
    """Which way."""

    direction: Literal["join", "split"] = Field(
        "join", description="join: turns whose tokens begin with those before become one row; split: one row a reply"
    )
    broken: Literal["keep", "reject"] = Field(
        "keep", description="join: episodes with a missing or doubled turn: left as they are, or rejected"
    )


class RegroupTurns(Operator[RegroupTurnsConfig]):
    """Joins the rows of an episode into one where their tokens allow it, or splits rows into one a reply.

    Rows with the same group_id, sample_index and attempt are an episode; turn_index is its order. join: a turn joins
    the row before when its tokens begin with exactly that row's tokens; else a new row starts, whose turn_index counts
    on. Nothing is encoded anew: ids, log-probs and weight versions stay as sampled, and every token that trained trains
    once. Rows without tokens join when the messages begin with those before. An episode whose turn_index is not 0, 1, 2
    … is left as it is, or rejected (`gap`, `duplicate_turn`). split: the n-th new row ends with the n-th reply, the
    only one that trains; a row with fewer assistant messages than trained replies is an error.

    Groups in which nothing changes are kept; all rows of the others are replaced (`replaced`) by a new group of the
    same size. Scores that no operator of the pipeline writes are carried over from the last row joined, or the row
    split.
    """

    Config = RegroupTurnsConfig

    def contract(self) -> Contract:
        """Reads tokens and places; needs whole groups; replaces rows."""
        reads = frozenset(
            (
                "messages",
                "total_tokens",
                "token_ids",
                "loss_mask",
                "sample_index",
                "attempt",
                "turn_index",
                "group_size",
            )
        )
        return Contract(reads=reads, scope="group", drops=True, adds=True, cost="python")

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Regroup every group that has something to regroup."""
        reissue = Reissue(frame, "replaced", f"turns {'joined' if self.config.direction == 'join' else 'split'}")
        errors: list[RowError] = []
        # A Python loop: prefixes are compared row by row.
        for group in episodes(frame):
            if self.config.direction == "join":
                self._join(reissue, group)
            else:
                errors += self._split(reissue, group)
        result = reissue.result()
        return Result(verdicts=result.verdicts, added=result.added, errors=errors)

    def _join(self, reissue: Reissue, group: list[list[int]]) -> None:
        frame = reissue.frame
        whole: list[list[int]] = []
        for episode in group:
            problem = _broken([frame["turn_index"][row] for row in episode])
            if problem and self.config.broken == "reject":
                reissue.replace(episode, problem)
            else:
                whole.append(episode)
        segments = [
            [[row] for row in episode]
            if _broken([frame["turn_index"][row] for row in episode])
            else _segments(episode, frame["token_ids"], frame["messages"])
            for episode in whole
        ]
        if all(len(segment) == 1 for parts in segments for segment in parts):
            return
        bundle, size = frame["group_id"][group[0][0]], size_of(frame, group)
        reissue.replace([row for episode in whole for row in episode])
        for sample, parts in enumerate(segments):
            for turn, rows in enumerate(parts):
                spans: list[Span] = []
                held = 0
                for row in rows:
                    length = frame["total_tokens"][row]
                    spans.append(span(row, held, length))
                    held = length
                reissue.add(
                    rows[-1], spans=spans if held else None, messages=frame["messages"][rows[-1]], bundle=bundle,
                    sample=sample, turn=turn, group_size=size,
                )  # fmt: skip

    def _split(self, reissue: Reissue, group: list[list[int]]) -> list[RowError]:
        frame = reissue.frame
        replies = {row: stretches(frame["loss_mask"][row].to_list()) for episode in group for row in episode}
        spoken = {
            row: [at for at, message in enumerate(frame["messages"][row]) if message["role"] == "assistant"]
            for row in replies
        }
        errors = [
            RowError(row, f"{len(found)} trained replies, but {len(spoken[row])} assistant messages")
            for row, found in replies.items()
            if len(found) > len(spoken[row])
        ]
        if errors or all(len(found) < 2 for found in replies.values()):
            return errors
        bundle, size = frame["group_id"][group[0][0]], size_of(frame, group)
        reissue.replace(list(replies))
        for sample, episode in enumerate(group):
            turn = 0
            for row in episode:
                if len(replies[row]) < 2:
                    reissue.again(row, bundle=bundle, sample=sample, turn=turn, group_size=size)
                    turn += 1
                    continue
                ends = spoken[row][len(spoken[row]) - len(replies[row]) :]
                for (start, stop), end in zip(replies[row], ends, strict=True):
                    reissue.add(
                        row, spans=[span(row, 0, start, trained=False), span(row, start, stop)],
                        messages=frame["messages"][row][: end + 1], bundle=bundle, sample=sample, turn=turn,
                        group_size=size,
                    )  # fmt: skip
                    turn += 1
        return errors


def _broken(turns: Sequence[int]) -> str | None:
    """What is wrong with the turn numbers of an episode; None: they are 0, 1, 2 …"""
    if len(set(turns)) < len(turns):
        return "duplicate_turn"
    return None if list(turns) == list(range(len(turns))) else "gap"


def _segments(episode: Sequence[int], tokens: pl.Series, messages: pl.Series) -> list[list[int]]:
    """Runs of rows of which each begins with the one before."""
    found: list[list[int]] = []
    before: list[Any] = []
    textual = False
    for row in episode:
        held: list[Any] = tokens[row].to_list()
        text = not held
        held = list(messages[row]) if text else held
        if found and text == textual and len(held) > len(before) and held[: len(before)] == before:
            found[-1].append(row)
        else:
            found.append([row])
        before, textual = held, text
    return found
