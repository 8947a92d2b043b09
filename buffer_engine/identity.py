"""Stable identifiers and seeds: the same inputs give the same value on every machine, process and Python version."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any


def stable_digest(*parts: object, size: int = 12) -> str:
    """Hex digest of `parts` (their JSON text), `size` bytes long."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).hexdigest()


def stable_seed(*parts: object) -> int:
    """A seed in [0, 2**63) derived from `parts`; independent of PYTHONHASHSEED."""
    return int(stable_digest(*parts, size=8), 16) >> 1


def group_id(run_id: str, task_id: str, visit: int) -> str:
    """The id of one group: the siblings that play one task together. `visit` counts how often the run scheduled it."""
    return "g" + stable_digest(run_id, task_id, visit)


def experience_id(run_id: str, task_id: str, group: str, attempt: int, sample: int, turn: int) -> str:
    """The id of a rollout row, deterministic in (run, task, group, attempt, sample, turn)."""
    return "x" + stable_digest(run_id, task_id, group, attempt, sample, turn)


def prompt_hash(messages: Sequence[Mapping[str, Any]]) -> str:
    """Hash of a prompt's roles and contents: equal prompts are equal whatever task set they come from."""
    return stable_digest([[message.get("role"), message.get("content")] for message in messages])
