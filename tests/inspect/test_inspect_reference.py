"""The page about SQL says what the views are."""

from __future__ import annotations

from pathlib import Path

import pytest

from buffer_engine.inspect import Inspection, named_queries, views
from buffer_engine.inspect.reference import reference_markdown, renewed

PAGE = Path(__file__).parents[2] / "docs" / "sql.md"


def test_the_page_is_what_its_command_writes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert renewed(page) == page, "run: python -m buffer_engine.inspect.reference docs/sql.md"


def test_every_column_of_every_view_has_a_meaning() -> None:
    assert [line for line in reference_markdown().splitlines() if line.endswith("|  |")] == []


def test_every_column_note_of_a_view_is_about_a_column_it_has(sample: Inspection) -> None:
    for view in views().values():
        assert set(view.columns) <= {name for name, _ in sample.columns(view.name)}, view.name


def test_every_named_query_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in named_queries() if f"| `{name}` |" not in page] == []


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="the page needs the marks"):
        renewed("# no marks")
