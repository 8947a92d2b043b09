"""A store with every kind of row for tests of export and import, and how to compare two stores."""

from __future__ import annotations

import sys
from pathlib import Path

from store_rows import decisions, rollout, score, table, task

from buffer_engine.schema import TABLES
from buffer_engine.store.local import LocalStore
from buffer_engine.store.opening import open_store

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
from fixture_store import fill


def make_store(folder: Path) -> None:
    """The store of every kind of row, with an attachment that a rollout refers to."""
    fill(folder)
    with open_store(folder) as store:
        picture = store.put_media(b"picture", "image/png", name="cat.png")
        look = {"role": "user", "content": "look", "tool_calls": None, "tool_call_id": None}
        rows = [rollout(6, messages=[{**look, "media": [f"sha256:{picture}", "https://example.org/a.png"]}])]
        store.append("rollouts", table("rollouts", rows))


def make_dialogues(folder: Path, rewards: dict[int, float | None], *, group_size: int = 2) -> None:
    """Rollouts by number, kept, with these rewards: the prompt of group g is `question g`, the reply `answer n`."""
    with open_store(folder) as store:
        groups = sorted({number // group_size for number in rewards})
        store.append(
            "tasks",
            table("tasks", [task(f"t{group}", messages=[said("user", f"question {group}")]) for group in groups]),
        )
        rows = [
            rollout(
                number, group_size=group_size,
                messages=[said("user", f"question {number // group_size}"), said("assistant", f"answer {number}")],
            )
            for number in rewards
        ]  # fmt: skip
        store.append("rollouts", table("rollouts", rows))
        store.append("scores", table("scores", [score(f"x{number}", value) for number, value in rewards.items()]))
        store.append("decisions", decisions(rewards))


def said(role: str, content: str, **more: object) -> dict[str, object]:
    """A message."""
    return {"role": role, "content": content, "tool_calls": None, "tool_call_id": None, "media": []} | more


def assert_equal_stores(one: LocalStore, other: LocalStore) -> None:
    """Same tables and the same state at every version."""
    assert one.version() == other.version()
    for version in range(one.version() + 1):
        for name in TABLES:
            assert one.table(name, until=version).equals(other.table(name, until=version)), (name, version)
        assert one.rollout_state(until=version).equals(other.rollout_state(until=version)), version
        assert one.batch_state(until=version).equals(other.batch_state(until=version)), version
    assert one.rollout_state().equals(other.rollout_state())
    assert one.batch_state().equals(other.batch_state())
