"""Drawing groups by weight from the sum tree, without replacement, in a number of reads that does not grow.

What a draw takes is subtracted from what this reservation has read of the tree; the tables follow when the next
reservation sees that the rows are taken.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TypeVar

from buffer_engine.errors import StoreError
from buffer_engine.store.connection import Connection
from buffer_engine.store.policies.tables import LEVELS

Name = TypeVar("Name", int, str)


def at_point(weights: Mapping[Name, int], point: int) -> tuple[Name, int]:
    """Which of the weights laid end to end covers `point`, and how far into it the point lies.

    Raises:
        StoreError: the point lies beyond their sum.
    """
    for name, weight in weights.items():
        if point < weight:
            return name, point
        point -= weight
    raise StoreError(
        "the sums in the reader's index do not add up; delete the rows of table reader_trees in the catalog, "
        "and the next reservation makes it anew"
    )


class Draws:
    """Draws from one tree."""

    def __init__(self, connection: Connection, tree: int, seed: int) -> None:
        self._connection = connection
        self._tree = tree
        self._random = random.Random(seed)
        self._read: dict[tuple[str, int, int], dict[int, int]] = {}
        self._groups: dict[int, str] = {}

    def below(self, end: int) -> int:
        """A whole number in [0, end)."""
        return self._random.randrange(end)

    def draw(self, stratum: str) -> tuple[str, int] | None:
        """A group of the part and its weight, each with a chance in proportion to it; None when all were drawn.

        The groups lie side by side in order of arrival, each as wide as its weight; a point decides.
        """
        top = self._children(stratum, len(LEVELS) + 1, 0)
        total = sum(top.values())
        if not total:
            return None
        point = self.below(total)
        level, children = len(LEVELS), top
        path: list[tuple[dict[int, int], int]] = []
        while True:
            child, point = at_point(children, point)
            path.append((children, child))
            if level == 0:
                break
            children = self._children(stratum, level, child)
            level -= 1
        weight = children[child]
        for where, part in path:
            where[part] -= weight
        return self._groups[child], weight

    def _children(self, stratum: str, level: int, node: int) -> dict[int, int]:
        """Children of a node by number, with what is left of their weights; level 1 has the groups themselves."""
        key = (stratum, level, node)
        if key not in self._read:
            self._read[key] = self._load(stratum, level, node)
        return self._read[key]

    def _load(self, stratum: str, level: int, node: int) -> dict[int, int]:
        if level > len(LEVELS):
            found = self._connection.execute(
                "SELECT node, weight FROM reader_nodes WHERE tree = ? AND stratum = ? AND level = ? ORDER BY node",
                (self._tree, stratum, len(LEVELS)),
            )
            return dict(found.fetchall())
        shift = LEVELS[level - 1] - (LEVELS[level - 2] if level > 1 else 0)
        start, end = node << shift, (node + 1) << shift
        if level > 1:
            found = self._connection.execute(
                "SELECT node, weight FROM reader_nodes WHERE tree = ? AND stratum = ? AND level = ? "
                "AND node >= ? AND node < ? ORDER BY node",
                (self._tree, stratum, level - 1, start, end),
            )
            return dict(found.fetchall())
        leaves = self._connection.execute(
            "SELECT first, weight, group_id FROM reader_leaves WHERE tree = ? AND stratum = ? AND weight > 0 "
            "AND first >= ? AND first < ? ORDER BY first",
            (self._tree, stratum, start, end),
        ).fetchall()
        self._groups.update((first, group_id) for first, _, group_id in leaves)
        return {first: weight for first, weight, _ in leaves}
