"""A batch from the groups that a policy offers: limits, order of rows, weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from buffer_engine.errors import StoreError
from buffer_engine.store.base import ReadPolicy
from buffer_engine.store.connection import Connection
from buffer_engine.store.policies.facts import EXPERT, Facts
from buffer_engine.store.policies.judging import GroupRow, Judgement, Refusal, judge, rows_of_group
from buffer_engine.store.policies.ready import ReadyIndex
from buffer_engine.store.policies.sources import Arrivals, Offer, Source, source_of


@dataclass(slots=True)
class Choice:
    """What one reservation takes and what it rejects.

    Attributes:
        rows: rows taken, in the order of the batch.
        weights: weight of each row; empty: all 1.
        refused: rows to reject.
        masked: rows taken without their over-age tokens, with the oldest version of each.
        off_ratio: how a mixture misses its ratio because a kind ran short, in words; empty: it does not.
    """

    rows: list[GroupRow] = field(default_factory=list[GroupRow])
    weights: list[float] = field(default_factory=list[float])
    refused: list[Refusal] = field(default_factory=list[Refusal])
    masked: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    off_ratio: str = ""


def choose(
    connection: Connection,
    facts: Facts,
    policy: ReadPolicy,
    *,
    run_id: str,
    batch_id: str,
    model_version: int,
) -> Choice:
    """Fill a batch.

    Raises:
        StoreError: a group is larger than the batch, or than its kind's part of it.
    """
    choice = Choice()
    if policy.type in ("fifo", "newest") and policy.max_uses == 1:
        source: Source = Arrivals(connection, run_id, newest=policy.type == "newest")
    else:
        index = ReadyIndex(connection, facts, policy, run_id, model_version)
        choice.refused += index.refused
        source = source_of(connection, index.number, policy, batch_id=batch_id, model_version=model_version)
    chances: list[float] = []
    parts: Counter[str] = Counter()
    tokens = 0
    while len(choice.rows) < policy.rows and (offer := source.offer()) is not None:
        rows = rows_of_group(connection, run_id, offer.group_id)
        found = judge(rows, policy, model_version, facts.newest_version)
        choice.refused += found.refused
        size = sum(facts.tokens(found.ready)) if policy.max_tokens is not None else 0
        why = _too_large(policy, offer, found, taken=len(choice.rows), tokens=tokens, size=size)
        if why is not None:
            if not choice.rows or _never_fits(policy, offer, found):
                raise StoreError(f"group {offer.group_id!r} has {why}: groups are taken whole")
            if not source.refused(offer):
                break
            continue
        source.took(offer, len(found.ready))
        tokens += size
        parts[offer.stratum] += len(found.ready)
        choice.rows += found.ready
        choice.masked += found.masked
        if offer.chance is not None:
            chances += [offer.chance] * len(found.ready)
    choice.weights = importance_weights(chances, policy.importance)
    if policy.expert_share is not None:
        choice.off_ratio = _off_ratio(policy.expert_share, parts[EXPERT], len(choice.rows))
    if policy.balance == "length":
        _balance(choice, facts)
    return choice


def importance_weights(chances: list[float], exponent: float) -> list[float]:
    """Weights that undo the bias of drawing: chance to the power of -exponent, the largest scaled to 1."""
    raw = [chance**-exponent for chance in chances]
    return [weight / max(raw) for weight in raw]


def alternate_lengths(lengths: list[int]) -> list[int]:
    """An order of rows: longest, shortest, second longest, second shortest …; equal lengths keep their order."""
    falling = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    half = (len(falling) + 1) // 2
    order: list[int] = []
    for place in range(half):
        order.append(falling[place])
        if len(falling) - 1 - place >= half:
            order.append(falling[len(falling) - 1 - place])
    return order


def _too_large(policy: ReadPolicy, offer: Offer, found: Judgement, *, taken: int, tokens: int, size: int) -> str | None:
    """Which limit a group would exceed, in words; None when it fits."""
    rows = len(found.ready)
    if taken + rows > policy.rows:
        return f"{rows} rows to train and a batch takes at most rows={policy.rows}; raise the reader's rows"
    if offer.room is not None and rows > offer.room:
        return (
            f"{rows} rows and the batch has {offer.room} places left for {offer.stratum} rows; raise the reader's rows"
        )
    if policy.max_tokens is not None and tokens + size > policy.max_tokens:
        return f"{size} tokens and a batch takes at most max_tokens={policy.max_tokens}; raise the reader's max_tokens"
    return None


def _never_fits(policy: ReadPolicy, offer: Offer, found: Judgement) -> bool:
    """Whether a group is larger than all places of its kind: no later batch has room for it either."""
    if offer.room is None:
        return False
    places = policy.expert_rows if offer.stratum == "expert" else policy.rows - policy.expert_rows
    return len(found.ready) > places


def _off_ratio(share: float, expert: int, rows: int) -> str:
    wanted = share * rows
    if abs(expert - wanted) < 1:
        return ""
    return f"{expert} expert rows of {rows}, the ratio asks for {wanted:.1f}"


def _balance(choice: Choice, facts: Facts) -> None:
    order = alternate_lengths(facts.tokens(choice.rows))
    choice.rows = [choice.rows[row] for row in order]
    choice.weights = [choice.weights[row] for row in order] if choice.weights else []
