"""The page on operators says what is shipped, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from operators.bridge.juicer_recipe import NATIVE
from operators.bridge.juicer_table import juicer_table
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


def test_the_page_on_data_juicer_lists_the_table_and_the_native_counterparts():
    page = (Path(__file__).parents[2] / "docs" / "data_juicer.md").read_text(encoding="utf-8")
    offline = page.split("## Operators that run offline")[1].split("## Recipes")[0]
    listed = re.findall(r"^\| `(\w+)` \| (\w+) \| (?:`(\w+)` )?\|", offline, re.MULTILINE)
    table = juicer_table().ops
    assert listed == [(name, op.effect, "".join(op.stats)) for name, op in table.items()]
    assert f"These {len(table)} are known" in offline
    assert re.findall(r"^\| `(\w+)` \|", page.split("## Recipes")[1], re.MULTILINE) == list(NATIVE)
