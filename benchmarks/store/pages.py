"""Parts of a page that a command fills: between `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""

from __future__ import annotations

from pathlib import Path

from buffer_engine.errors import UsageError


def check(path: Path, name: str = "store") -> None:
    """Refuse a page without the marks, before minutes are spent on measuring.

    Raises:
        UsageError: the file is missing or holds no such part; says which lines to add.
    """
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    begin, end = _marks(name)
    if begin not in text or end not in text.partition(begin)[2]:
        raise UsageError(f"{path} has no part to fill → add the lines {begin} and {end}")


def fill(path: Path, name: str, content: str) -> None:
    """Replace what lies between the marks."""
    check(path, name)
    begin, end = _marks(name)
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    path.write_text(f"{before}{begin}\n\n{content.strip()}\n\n{end}{after}", encoding="utf-8")


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
