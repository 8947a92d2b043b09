"""The packaged SQL: views, and queries that have a name.

`derived` holds what several views share and is worked out once per version instead of in every query.

One file each, so that a person can read, copy and change them. The first comment line of a file is its help; the
comment lines after it (`--   column: meaning`) explain computed columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

VIEW_ORDER = (
    "tasks",
    "rollouts",
    "decisions",
    "batch_rows",
    "models",
    "operator_runs",
    "events",
    "token_stats",
    "media",
    "erasures",
    "quarantine",
    "scores",
    "staleness",
    "rewards",
    "reward_components",
    "experiences",
    "groups",
    "drops",
    "transcripts",
    "tokens",
    "batches",
    "funnel",
    "conservation",
    "metrics",
    "runs",
)
"""Names of the views; each uses only those before it."""

DERIVED_ORDER = ("rewards", "experiences")
"""Names of what is worked out once per version; each uses only those before it and views that use none of them."""

_COLUMN_NOTE = re.compile(r"^--   (?P<columns>[a-z_]+(?:, [a-z_]+)*): (?P<meaning>.+)$")


@dataclass(frozen=True, slots=True)
class SqlText:
    """One packaged statement.

    Attributes:
        help: one sentence, from the first comment.
        columns: computed column → meaning, from the comments after it.
        sql: the file's text, comments included, without a final semicolon.
    """

    name: str
    help: str
    columns: Mapping[str, str]
    sql: str


def parse_sql(name: str, text: str) -> SqlText:
    """Read the help and the column notes from a file's leading comments.

    Raises:
        ValueError: the text does not begin with a comment.
    """
    lines = text.splitlines()
    if not lines or not lines[0].startswith("-- "):
        raise ValueError(f"SQL file {name!r} must begin with a comment that says what it answers")
    columns: dict[str, str] = {}
    latest: list[str] = []
    for line in lines[1:]:
        if not line.startswith("--   "):
            break
        note = _COLUMN_NOTE.match(line)
        if note is not None:
            latest = note["columns"].split(", ")
            columns |= dict.fromkeys(latest, note["meaning"])
        else:
            columns |= {column: f"{columns[column]} {line.removeprefix('--').strip()}" for column in latest}
    return SqlText(name, lines[0].removeprefix("-- ").strip(), columns, text.strip().removesuffix(";"))


@cache
def views() -> Mapping[str, SqlText]:
    """All views, in the order in which they can be created."""
    found = _load("views")
    return {name: found[name] for name in VIEW_ORDER}


@cache
def derived() -> Mapping[str, SqlText]:
    """What views share and is worked out once per version, in the order in which it can be."""
    found = _load("derived")
    return {name: found[name] for name in DERIVED_ORDER}


@cache
def named_queries() -> Mapping[str, SqlText]:
    """All named queries, by name."""
    return _load("queries")


def _load(folder: str) -> dict[str, SqlText]:
    root = resources.files("buffer_engine.inspect") / folder
    files = sorted((entry for entry in root.iterdir() if entry.name.endswith(".sql")), key=lambda entry: entry.name)
    return {
        entry.name.removesuffix(".sql"): parse_sql(entry.name.removesuffix(".sql"), entry.read_text(encoding="utf-8"))
        for entry in files
    }
