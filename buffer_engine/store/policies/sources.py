"""The order in which each policy offers groups to a batch."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from buffer_engine.identity import stable_seed
from buffer_engine.store.base import ReadPolicy
from buffer_engine.store.connection import Connection, stream
from buffer_engine.store.policies.drawing import Draws, at_point
from buffer_engine.store.policies.facts import EXPERT, ROLLOUT
from buffer_engine.store.policies.ready import priority_weight


@dataclass(frozen=True, slots=True)
class Offer:
    """A group that may come next.

    Attributes:
        stratum: the part it comes from; empty when the policy has no parts.
        room: most rows that it may have for its part of the batch; None: only the batch limits it.
        chance: probability of the first draw to be this group times the number of ready groups; None: not drawn by
            priority.
    """

    group_id: str
    stratum: str = ""
    room: int | None = None
    chance: float | None = None


class Source(Protocol):
    """Offers groups one by one, told what became of each."""

    def offer(self) -> Offer | None:
        """The next group; None when there is none."""
        ...

    def took(self, offer: Offer, rows: int) -> None:
        """The batch took `rows` rows of an offered group (0: it had none after all)."""
        ...

    def refused(self, offer: Offer) -> bool:
        """An offered group did not fit; whether something else may still."""
        ...


class _Plain:
    """A source that does not care what became of its offers."""

    def took(self, offer: Offer, rows: int) -> None:
        """Nothing to remember."""

    def refused(self, offer: Offer) -> bool:
        """The batch ends here, so that nothing overtakes the group."""
        return False


class Arrivals(_Plain):
    """Groups in order of arrival or its reverse, straight from the row index: for rows that train once."""

    def __init__(self, connection: Connection, run_id: str, *, newest: bool) -> None:
        way = "DESC" if newest else "ASC"
        self._seen: set[str] = set()
        self._rows = stream(
            connection,
            "SELECT group_id FROM index_rollouts WHERE run_id = ? AND partition = 'train' AND uses = 0 "
            f"AND status = 'kept' ORDER BY group_first {way}, group_id {way}",
            (run_id,),
        )

    def offer(self) -> Offer | None:
        """The next group with a kept row that never trained."""
        for (group_id,) in self._rows:
            if group_id not in self._seen:
                self._seen.add(group_id)
                return Offer(group_id)
        return None


class Inside:
    """Groups of single parts of a tree, in the order that a policy declares for inside a part."""

    def __init__(self, connection: Connection, tree: int, order: str, draws: Draws) -> None:
        self._connection = connection
        self._tree = tree
        self._order = order
        self._draws = draws
        self._walks: dict[str, Iterator[tuple[str]]] = {}

    def next(self, stratum: str) -> str | None:
        """The part's next group; None when it has no more."""
        if self._order == "uniform":
            drawn = self._draws.draw(stratum)
            return None if drawn is None else drawn[0]
        if stratum not in self._walks:
            way = "DESC" if self._order == "newest" else "ASC"
            self._walks[stratum] = stream(
                self._connection,
                "SELECT group_id FROM reader_leaves WHERE tree = ? AND stratum = ? AND weight > 0 "
                f"ORDER BY first {way}",
                (self._tree, stratum),
            )
        found = next(self._walks[stratum], None)
        return None if found is None else found[0]


class WholeTree(_Plain):
    """fifo, newest and uniform over a tree of one part."""

    def __init__(self, inside: Inside) -> None:
        self._inside = inside

    def offer(self) -> Offer | None:
        """The next ready group."""
        group_id = self._inside.next("")
        return None if group_id is None else Offer(group_id)


class Prioritized(_Plain):
    """Groups with a chance in proportion to their priority."""

    def __init__(self, connection: Connection, tree: int, policy: ReadPolicy, draws: Draws, model_version: int) -> None:
        self._draws = draws
        parts = connection.execute(
            "SELECT stratum, ready, weight FROM reader_strata WHERE tree = ? AND ready > 0", (tree,)
        ).fetchall()
        parts.sort(key=lambda part: (part[0] == "", int(part[0] or 0)))
        # by staleness a part is a weight version, and all its groups weigh what that version weighs today
        ages = {part: policy.unseen if part == "" else float(model_version - int(part)) for part, _, _ in parts}
        each = {part: priority_weight(policy, age) for part, age in ages.items()}
        self._each = each if policy.by == "staleness" else {"": 1}
        self._left = {part: self._each[part] * weight for part, _, weight in parts}
        self._ready = sum(ready for _, ready, _ in parts)
        self._total = sum(self._left.values())

    def offer(self) -> Offer | None:
        """The next draw, without replacement."""
        left = sum(self._left.values())
        if not left:
            return None
        stratum, _ = at_point(self._left, self._draws.below(left) if len(self._left) > 1 else 0)
        drawn = self._draws.draw(stratum)
        assert drawn is not None
        weight = drawn[1] * self._each[stratum]
        self._left[stratum] -= weight
        return Offer(drawn[0], stratum, chance=self._ready * weight / self._total)


class Stratified:
    """The part with the fewest rows in the batch comes next; of equal ones that used least so far, then by name."""

    def __init__(self, connection: Connection, tree: int, rows: int, inside: Inside) -> None:
        self._inside = inside
        found = connection.execute(
            "SELECT served, stratum FROM reader_strata WHERE tree = ? AND ready > 0 ORDER BY served, stratum LIMIT ?",
            (tree, rows),
        )
        self._served: dict[str, int] = {stratum: served for served, stratum in found}
        self._heap = [(0, served, stratum) for stratum, served in self._served.items()]
        heapq.heapify(self._heap)
        self._rows: Counter[str] = Counter()

    def offer(self) -> Offer | None:
        """The next group of the part whose turn it is."""
        while self._heap:
            _, _, stratum = heapq.heappop(self._heap)
            group_id = self._inside.next(stratum)
            if group_id is not None:
                return Offer(group_id, stratum)
        return None

    def took(self, offer: Offer, rows: int) -> None:
        """Put the part back in line."""
        self._rows[offer.stratum] += rows
        self._served[offer.stratum] += rows > 0
        heapq.heappush(self._heap, (self._rows[offer.stratum], self._served[offer.stratum], offer.stratum))

    def refused(self, offer: Offer) -> bool:
        """The batch ends here."""
        return False


class Mixture:
    """Rollouts and expert rows, each up to its places in the batch; the kind that is further behind comes next."""

    def __init__(self, policy: ReadPolicy, inside: Inside) -> None:
        self._inside = inside
        self._places = {EXPERT: policy.expert_rows, ROLLOUT: policy.rows - policy.expert_rows}
        self._rows = dict.fromkeys(self._places, 0)
        self._open = list(self._places)

    def offer(self) -> Offer | None:
        """The next group of a kind that has places left."""
        while True:
            waiting = [kind for kind in self._open if self._rows[kind] < self._places[kind]]
            if not waiting:
                return None
            kind = min(waiting, key=lambda one: self._rows[one] / self._places[one])
            group_id = self._inside.next(kind)
            if group_id is not None:
                return Offer(group_id, kind, room=self._places[kind] - self._rows[kind])
            self._open.remove(kind)

    def took(self, offer: Offer, rows: int) -> None:
        """Fill places."""
        self._rows[offer.stratum] += rows

    def refused(self, offer: Offer) -> bool:
        """This kind is done; the other goes on."""
        self._open.remove(offer.stratum)
        return True


def source_of(connection: Connection, tree: int, policy: ReadPolicy, *, batch_id: str, model_version: int) -> Source:
    """The source of a policy that reads a tree; random ones draw from (seed, batch id) and the ready groups alone."""
    draws = Draws(connection, tree, stable_seed(policy.seed or 0, batch_id))
    if policy.type == "prioritized":
        return Prioritized(connection, tree, policy, draws, model_version)
    order = policy.type if policy.type in ("fifo", "newest", "uniform") else policy.order
    inside = Inside(connection, tree, order, draws)
    if policy.type == "stratified":
        return Stratified(connection, tree, policy.rows, inside)
    return Mixture(policy, inside) if policy.type == "mixture" else WholeTree(inside)
