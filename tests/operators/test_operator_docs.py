"""The page on operators says what is shipped, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from operators.registry import OPERATORS
from operators.testing import check_operator

PAGE = (Path(__file__).parents[2] / "docs" / "operators.md").read_text(encoding="utf-8")


def test_the_table_lists_every_shipped_operator_once():
    section = PAGE.split("## Shipped operators")[1].split("## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == sorted(OPERATORS.builtin)


def test_the_example_operator_keeps_its_contract():
    example, check = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(example, "docs/operators.md", "exec"), names)
    exec(compile(check, "docs/operators.md", "exec"), names)
    kind, settings = names["QuestionFilter"], names["QuestionFilterConfig"]
    check_operator(kind, settings(type="mine.question_filter", most=1))
