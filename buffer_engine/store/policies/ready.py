"""The index of ready groups: brought up to date with what changed since the last reservation, never scanned.

A *tree* belongs to one run and one way of reading it. Its leaves are the groups that are ready, in parts (strata) that
the policy shares between. Weights are whole numbers, so the sums in the tree do not depend on the order of additions:
the same groups give the same draws however they came to be there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from buffer_engine.store.base import ReadPolicy
from buffer_engine.store.connection import Connection
from buffer_engine.store.policies.facts import Facts
from buffer_engine.store.policies.judging import GroupRow, Refusal, judge, rows_of_changed, rows_of_group
from buffer_engine.store.policies.tables import LEVELS, need_index

SCALE = 1 << 20
"""Weight of a group with priority 1; priorities above 2**20 or below 2**-20 count as these."""
_TREES_PER_RUN = 4
_NO_PART = ("rows", "min_rows", "seed", "samples_per_insert", "min_size", "balance", "max_tokens", "importance")
"""Fields that do not change which groups are ready or how they weigh: policies that differ in them share a tree."""


class Leaf(NamedTuple):
    """A group in a tree, in the order of the table's columns; weight 0: not ready."""

    first: int
    stratum: str
    weight: int
    served: int
    recheck: int | None


def weighs(policy: ReadPolicy) -> bool:
    """Whether groups are drawn by chance, which needs sums of weights."""
    return policy.type in ("uniform", "prioritized") or policy.order == "uniform"


def priority_weight(policy: ReadPolicy, value: float) -> int:
    """The whole-number weight of a group whose mean is `value`; values below 0 count as 0."""
    above = max(value, 0.0)
    priority = policy.floor + above if policy.favor == "high" else 1.0 / (1.0 + above)
    return min(max(1, round(priority**policy.exponent * SCALE)), SCALE * SCALE)


class _Changes:
    """Leaves of one tree that are replaced, and what that adds to the sums above them."""

    def __init__(self, tree: int) -> None:
        self.tree = tree
        self._ready: Counter[str] = Counter()
        self._weight: Counter[str] = Counter()
        self._served: Counter[str] = Counter()
        self._nodes: Counter[tuple[str, int, int]] = Counter()
        self._stored: list[tuple[object, ...]] = []
        self._gone: list[tuple[int, str]] = []

    def replace(self, group_id: str, before: Leaf | None, after: Leaf | None, *, sums: bool) -> None:
        """Put `after` in the place of `before`; None: no leaf. `sums`: the tree has inner nodes."""
        for leaf, sign in ((before, -1), (after, 1)):
            if leaf is None:
                continue
            self._ready[leaf.stratum] += sign * (leaf.weight > 0)
            self._weight[leaf.stratum] += sign * leaf.weight
            self._served[leaf.stratum] += sign * leaf.served
            if sums and leaf.weight:
                for level, shift in enumerate(LEVELS, 1):
                    self._nodes[leaf.stratum, level, leaf.first >> shift] += sign * leaf.weight
        if after is None:
            self._gone.append((self.tree, group_id))
        else:
            self._stored.append((self.tree, group_id, *after))

    def write(self, connection: Connection) -> None:
        """Write everything down."""
        tree, execute = self.tree, connection.executemany
        execute("DELETE FROM reader_leaves WHERE tree = ? AND group_id = ?", self._gone)
        execute("INSERT OR REPLACE INTO reader_leaves VALUES (?, ?, ?, ?, ?, ?, ?)", self._stored)
        execute(
            "INSERT INTO reader_strata VALUES (?, ?, ?, ?, ?) ON CONFLICT (tree, stratum) DO UPDATE SET "
            "ready = reader_strata.ready + excluded.ready, weight = reader_strata.weight + excluded.weight, "
            "served = reader_strata.served + excluded.served",
            [(tree, one, self._ready[one], self._weight[one], self._served[one]) for one in self._ready],
        )
        nodes = [(tree, *key, change) for key, change in self._nodes.items() if change]
        execute(
            "INSERT INTO reader_nodes VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (tree, stratum, level, node) DO UPDATE SET weight = reader_nodes.weight + excluded.weight",
            nodes,
        )
        execute(
            "DELETE FROM reader_nodes WHERE tree = ? AND stratum = ? AND level = ? AND node = ? AND weight = 0",
            [node[:4] for node in nodes if node[4] < 0],
        )


class ReadyIndex:
    """One tree of the index, inside one transaction; `number` is its key in the tables."""

    def __init__(
        self, connection: Connection, facts: Facts, policy: ReadPolicy, run_id: str, model_version: int
    ) -> None:
        """Find or make the tree of `policy` and bring it up to `model_version`.

        Attributes:
            refused: rows that became stale or incomplete, to be rejected.
        """
        need_index(connection)
        self._connection = connection
        self._facts = facts
        self._policy = policy
        self._run_id = run_id
        self._version = model_version
        self.refused: list[Refusal] = []
        self._made: int | None = None
        self.number = self._tree()
        self._refresh()

    def _tree(self) -> int:
        """The tree's key; a new one finds every group of the run changed."""
        signature = json.dumps(self._policy.model_dump(mode="json", exclude=set(_NO_PART)), sort_keys=True)
        (clock,) = self._connection.execute("SELECT coalesce(max(used), 0) + 1 FROM reader_trees").fetchone()
        found = self._connection.execute(
            "SELECT tree, version FROM reader_trees WHERE run_id = ? AND policy = ?", (self._run_id, signature)
        ).fetchone()
        if found is not None and found[1] <= self._version:
            self._connection.execute(
                "UPDATE reader_trees SET version = ?, used = ? WHERE tree = ?", (self._version, clock, found[0])
            )
            return int(found[0])
        if found is not None:  # weights went back to an earlier version: what was over-age may not be any more
            self._drop([found[0]])
        ((made,),) = self._connection.execute(
            "INSERT INTO reader_trees (run_id, policy, version, used) VALUES (?, ?, ?, ?) RETURNING tree",
            (self._run_id, signature, self._version, clock),
        ).fetchall()
        trees = self._connection.execute(
            "SELECT tree FROM reader_trees WHERE run_id = ? ORDER BY used DESC", (self._run_id,)
        ).fetchall()
        self._drop([tree for (tree,) in trees[_TREES_PER_RUN:]])
        self._connection.execute(
            "INSERT OR IGNORE INTO reader_dirty SELECT DISTINCT run_id, group_id FROM index_rollouts "
            "WHERE run_id = ? AND partition = 'train'",
            (self._run_id,),
        )
        self._made = made
        return made

    def _drop(self, trees: Iterable[int]) -> None:
        for tree in trees:
            for table in ("reader_leaves", "reader_strata", "reader_nodes", "reader_trees"):
                self._connection.execute(f"DELETE FROM {table} WHERE tree = ?", (tree,))

    def _refresh(self) -> None:
        found = self._connection.execute(
            "SELECT tree, policy, version FROM reader_trees WHERE run_id = ?", (self._run_id,)
        ).fetchall()
        trees = {tree: (_policy(text), version) for tree, text, version in found}
        self._facts.catch_up([policy for policy, _ in trees.values()])
        changes = {tree: _Changes(tree) for tree in trees}
        for group_id, rows in rows_of_changed(self._connection, self._run_id):
            for tree, (policy, version) in trees.items():
                self._renew(changes[tree], policy, version, group_id, rows)
        policy, version = trees[self.number]
        due = self._connection.execute(
            # without the hint SQLite walks all leaves of the tree
            "SELECT group_id FROM reader_leaves INDEXED BY reader_leaves_due WHERE tree = ? AND recheck <= ? "
            "AND group_id NOT IN (SELECT group_id FROM reader_dirty WHERE run_id = ?)",
            (self.number, version, self._run_id),
        )
        for (group_id,) in due.fetchall():
            rows = rows_of_group(self._connection, self._run_id, group_id)
            self._renew(changes[self.number], policy, version, group_id, rows)
        for change in changes.values():
            change.write(self._connection)
        self._connection.execute("DELETE FROM reader_dirty WHERE run_id = ?", (self._run_id,))

    def _renew(
        self, changes: _Changes, policy: ReadPolicy, version: int, group_id: str, rows: Sequence[GroupRow]
    ) -> None:
        before = None if changes.tree == self._made else self._stored(changes.tree, group_id)
        after = self._leaf(changes.tree, policy, version, rows)
        if before != after:
            changes.replace(group_id, before, after, sums=weighs(policy))

    def _stored(self, tree: int, group_id: str) -> Leaf | None:
        found = self._connection.execute(
            "SELECT first, stratum, weight, served, recheck FROM reader_leaves WHERE tree = ? AND group_id = ?",
            (tree, group_id),
        ).fetchone()
        return None if found is None else Leaf(*found)

    def _leaf(self, tree: int, policy: ReadPolicy, version: int, rows: Sequence[GroupRow]) -> Leaf | None:
        if not rows:
            return None
        found = judge(rows, policy, version, self._facts.newest_version)
        recheck = found.recheck
        if found.refused and tree == self.number:
            self.refused += found.refused
        elif found.refused:
            recheck = version  # whoever reads with that policy next rejects them
        served = 0
        if policy.type == "stratified":
            served = max(row.uses + (row.reserved_by is not None) for row in rows)
        if not found.ready and recheck is None and not served:
            return None
        stratum = self._facts.stratum(policy, rows, found.ready)
        weight = 0
        if found.ready:
            plain = policy.type != "prioritized" or policy.by == "staleness"
            weight = 1 if plain else priority_weight(policy, self._facts.priority(policy, found.ready))
        return Leaf(min(row.sequence for row in rows), stratum, weight, served, recheck)


def _policy(text: str) -> ReadPolicy:
    """The policy of a stored tree; `rows` is not part of it and large enough for any ratio."""
    return ReadPolicy.model_validate(json.loads(text) | {"rows": 1 << 30})
