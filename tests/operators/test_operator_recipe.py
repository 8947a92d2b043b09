"""The recipe for a new operator: its places exist, and its example passes what the tests ask of shipped operators."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from operators.registry import OPERATORS
from operators.testing import check_operator

ROOT = Path(__file__).parents[2]
RECIPE = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8").partition("## Writing one")[2]


def example() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(re.findall(r"```python\n(.*?)```", RECIPE, re.DOTALL)[0], "docs/operators.md", "exec"), names)
    return names


def test_the_example_is_described_as_shipped_operators_are():
    operator = example()["QuestionFilter"]

    assert len(operator.__doc__) > 80
    assert operator.Config.model_config["extra"] == "forbid"
    assert all(field.description for field in operator.Config.model_fields.values())


def test_the_example_keeps_its_contract_whatever_it_allows():
    names = example()

    for most in (0, 1, 7):
        check_operator(names["QuestionFilter"], names["QuestionFilterConfig"](type="mine.question_filter", most=most))


def test_every_file_that_the_recipe_names_is_there():
    named = re.findall(r"`((?:operators|tests|docs)/[\w/]+\.(?:py|md))`", RECIPE)

    assert len(named) >= 5
    assert [name for name in named if not (ROOT / name).exists()] == ["operators/filter/question_filter.py"]
    families = re.search(r"The folder says what it does: ([^;]+);", RECIPE).group(1)  # type: ignore[union-attr]
    # not every folder is a family: the sandbox is what operators use
    assert set(re.findall(r"`(\w+)`", families)) == {place.split(".")[1] for place in OPERATORS.builtin.values()}
