"""The table of rules: every rule has a test that exists, or says which later part it belongs to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROWS = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", (Path(__file__).parent / "README.md").read_text(), re.MULTILINE)
NAMED = [
    (int(number), file, name)
    for number, _, proofs in ROWS
    for file, name in re.findall(r"`([\w/]+\.py)::(test_\w+)`", proofs)
]


def test_every_rule_has_a_line() -> None:
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 26))


def test_a_rule_without_a_test_says_when_it_gets_one() -> None:
    proven = {number for number, _, _ in NAMED}
    waiting = {int(number) for number, _, proofs in ROWS if "later: issue" in proofs}
    assert proven | waiting == set(range(1, 26))
    assert len(proven) >= 24


@pytest.mark.parametrize(("number", "file", "name"), NAMED)
def test_a_named_test_exists(number: int, file: str, name: str) -> None:
    path = TESTS / file
    assert path.is_file(), f"rule {number}: tests/{file} is not there"
    assert re.search(rf"^(async )?def {name}\(", path.read_text(), re.MULTILINE), f"rule {number}: no {name} in {file}"
