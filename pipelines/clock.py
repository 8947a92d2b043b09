"""Small facts about now and here that rows carry: time, code commit."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path


def now() -> datetime:
    """The current time in UTC, as the tables' timestamps hold it."""
    return datetime.now(UTC)


@cache
def code_commit() -> str:
    """The git commit of a source checkout (with `+changes` when files differ from it), else the package version."""
    root = Path(__file__).resolve().parent.parent
    if (root / ".git").exists():
        try:
            commit = _git(root, "rev-parse", "HEAD")
            changes = _git(root, "status", "--porcelain", "--untracked-files=no")
        except (OSError, subprocess.CalledProcessError):
            # Without a git program, or in an unborn repository, the installed version is the best name there is.
            return f"buffer-engine {version('buffer-engine')}"
        return commit + ("+changes" if changes else "")
    return f"buffer-engine {version('buffer-engine')}"


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()
