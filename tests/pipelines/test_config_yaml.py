"""YAML text: plain data, lines, and every way in which it can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buffer_engine.errors import ConfigError, Problem
from pipelines.yaml_text import MAX_BYTES, parse_document, parse_value, read_document


def problems(text: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_document(text)
    return caught.value.problems


def test_scalars_follow_yaml_1_2() -> None:
    text = "a: [1, 0x1F, 0o17, 012, 1_000, 1.5, 2.0e-5, 1e-5, .inf, true, yes, on, ~, 2026-01-02, '7', \"\\t\"]"

    assert parse_document(text).data["a"] == [
        1, 31, 15, 12, 1000, 1.5, 2.0e-5, 1e-5, float("inf"), True, "yes", "on", None, "2026-01-02", "7", "\t",
    ]  # fmt: skip


def test_every_key_and_item_has_its_line() -> None:
    document = parse_document(
        "# comment\nversion: 1\nstore:\n  path: x\noperators:\n- {id: a}\n-\n  id: b\n  weight: 1\n"
    )

    assert document.lines == {
        "": 2,
        "version": 2,
        "store": 3,
        "store.path": 4,
        "operators": 5,
        "operators.0": 6,
        "operators.0.id": 6,
        "operators.1": 8,
        "operators.1.id": 8,
        "operators.1.weight": 9,
    }


def test_a_duplicate_key_is_refused_with_both_lines_at_any_depth() -> None:
    found = problems("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\na: 2\n")

    assert [(problem.path, problem.line) for problem in found] == [("b.c", 5), ("a", 6)]
    assert "first in line 3, again in line 5" in found[0].message
    assert "first in line 1, again in line 6" in found[1].message


def test_an_alias_repeats_a_value_and_a_merge_key_fills_in_what_is_not_written() -> None:
    data = parse_document("base: &b {x: 1, y: 2}\nsame: *b\nmerged:\n  <<: *b\n  y: 3\n").data

    assert data["same"] == {"x": 1, "y": 2}
    assert data["merged"] == {"x": 1, "y": 3}


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", 1, "the file is empty"),
        ("# nothing\n", 1, "the file is empty"),
        ("- a\n- b\n", 1, "found a list"),
        ("\njust words\n", 2, "the single value 'just words'"),
        ("a: 1\n---\nb: 2\n", 3, "several documents"),
        ("a:\n\tb: 1\n", 2, "not YAML"),
        ("a:\n  b: 1\n c: 2\n", 3, "not YAML"),
        ("a: 1\nb: [1, 2\n", 2, "not YAML"),
        ("a: b: c\n", 1, "not YAML"),
        ("a: *nowhere\n", 1, "undefined alias"),
        ("a: 1\nb: \x07\n", 2, "not YAML"),
        ("a: 1\n7: x\n", 2, "a key must be text"),
        ("? [x]\n: 1\n", 1, "a key must be text"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "is not supported"),
        ("a: !custom x\n", 1, "is not supported"),
        ("a: !!int seven\n", 1, "cannot be read as int"),
        ("a: &x [*x]\n", 1, "an alias contains itself"),
        ("a: " + "[" * 5000 + "\n", 1, "nested too deeply"),
        ("a: 1" + "0" * 5000 + "\n", 1, "cannot be read as int"),
        ("a: " + "x" * MAX_BYTES + "\n", None, "too many for a specification"),
    ],
)
def test_text_that_is_not_one_mapping_is_refused_with_its_line(text: str, line: int | None, said: str) -> None:
    found = problems(text)

    assert said in found[0].message
    assert found[0].line == line


def test_tabs_are_named_as_the_cause() -> None:
    assert problems("a:\n\tb: 1\n")[0].fix == "indent with spaces, not tabs"


def test_aliases_that_multiply_are_refused_before_they_are_expanded() -> None:
    levels = ["l0: &l0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 10)]

    assert "aliases expand to more than" in problems("\n".join(levels))[0].message


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text("version: 1\n")

    with pytest.raises(ConfigError) as caught:
        read_document(tmp_path / "dmeo.yaml")

    assert "there is no such file" in str(caught.value)
    assert "demo.yaml" in str(caught.value)


def test_bytes_that_are_not_utf_8_are_refused_with_their_line(tmp_path: Path) -> None:
    file = tmp_path / "latin.yaml"
    file.write_bytes("version: 1\nname: caf\xe9\n".encode("latin-1"))

    with pytest.raises(ConfigError, match=r"latin\.yaml:2: byte 0xe9 is not UTF-8"):
        read_document(file)


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is a folder"):
        read_document(tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", 0.1),
        ("true", True),
        ("[a, 2]", ["a", 2]),
        ("{x: 1}", {"x": 1}),
        ("", None),
        ("null", None),
        ("plain", "plain"),
    ],
)
def test_a_value_from_the_command_line_is_typed_as_in_yaml(text: str, value: object) -> None:
    assert parse_value(text) == value


_FRAGMENTS = st.sampled_from(
    ["a", ": ", "\n", "  ", "\t", "- ", "[", "]", "{", "}", ",", "&x ", "*x", "!!", "!t ", "<<: ", "? ", "---\n",
     "...\n", "%YAML 1.2\n", "|\n", ">-\n", '"', "'", "#", "${env:", "1", "1e999", "-.inf", "0x", "\\", "\x00",
     "\x85", "\ufeff", "é"]
)  # fmt: skip


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(st.text(max_size=60), st.lists(_FRAGMENTS, max_size=25).map("".join)))
def test_any_text_gives_data_or_a_config_error(text: str) -> None:
    try:
        keys = list(parse_document(text).data)
    except ConfigError as error:
        keys = [problem.message for problem in error.problems]

    assert all(isinstance(key, str) for key in keys)
