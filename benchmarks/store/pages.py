"""Parts of a page that a command fills: between the lines `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""

from __future__ import annotations

import re
from pathlib import Path

from buffer_engine.errors import UsageError


def check(path: Path, name: str = "store") -> None:
    """Refuse a page without the marks, before minutes are spent on measuring.

    Raises:
        UsageError: the file is missing or holds no such part; says which lines to add.
    """
    _part(path, name)


def fill(path: Path, name: str, content: str) -> None:
    """Replace what lies between the marks."""
    text, start, end = _part(path, name)
    path.write_text(f"{text[:start]}\n\n{content.strip()}\n\n{text[end:]}", encoding="utf-8")


def _part(path: Path, name: str) -> tuple[str, int, int]:
    """The page, and where the part begins and ends. A mark in the middle of a line is text that speaks of marks."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    found = re.search(rf"^{re.escape(begin)}$(.*?)^{re.escape(end)}$", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise UsageError(f"{path} has no part to fill → add the lines {begin} and {end}")
    return text, found.start(1), found.end(1)
