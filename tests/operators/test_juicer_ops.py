"""Every operator of the table runs in the real Data-Juicer, offline, and does what the table says."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from juicer_python import juicer_python
from operator_rows import apply, frame

from operators.bridge.juicer_process import JuicerProcess
from operators.bridge.juicer_recipe import NATIVE
from operators.bridge.juicer_table import FILTER_ARGS, MANAGED_ARGS, juicer_table

pytestmark = pytest.mark.slow

TEXTS = [
    "", " \n\t ", "Mail a@b.com, see https://x.org/a?b=1 or 10.0.0.1.", "# T\n\nthe the the the the the the",
    "/* Copyright (c) 2020 */\nint x = 1;\n", "\\section{A}\n\\newcommand{\\ab}{long}\nx \\ab y % note\n",
    "短い文。１２３", "<b>bold</b> &amp; thin", "a | b | c\n1 | 2 | 3\n", "e\u0301\u200d👩‍👩‍👧 \u2028\x0b", "a " * 5000,
]  # fmt: skip

ARGS: dict[str, dict[str, Any]] = {
    "general_field_filter": {"filter_condition": "n > 3 and text != 'x'"},
    "specified_field_filter": {"field_key": "n", "target_value": [1, 2]},
    "specified_numeric_field_filter": {"field_key": "n", "min_value": 2},
    "replace_content_mapper": {"pattern": "[ab]", "repl": "c"},
    "remove_words_with_incorrect_substrings_mapper": {"substrings": ["http"]},
}
"""Arguments for operators that do nothing, or nothing here, without."""

OWN_KEYS = {"messages_key", "redact_keys"}
"""Arguments that name fields a row has not; the table leaves them out."""


@pytest.fixture(scope="module")
def juicer() -> Generator[JuicerProcess]:
    """One process for all operators."""
    process = JuicerProcess(str(juicer_python()), network=False)
    yield process
    process.close()


def made(juicer: JuicerProcess, op: str, args: dict[str, Any]) -> dict[str, Any]:
    answer = juicer.ask({"do": "open", "key": "a", "op": op, "args": args, "network": False}, seconds=60)
    assert isinstance(answer, tuple), answer
    return dict(answer[0])


def ran(juicer: JuicerProcess, op: str, texts: list[str], **args: Any) -> list[dict[str, Any]]:
    """The results of an operator; no row may fail."""
    assert made(juicer, op, args) == {"effect": juicer_table().ops[op].effect}
    return results(juicer, op, texts)


def results(juicer: JuicerProcess, op: str, texts: list[str]) -> list[dict[str, Any]]:
    """The results of the operator that was made last."""
    entry = juicer_table().ops[op]
    rows = pa.table({"text": texts, "n": list(range(len(texts)))})
    answer = juicer.ask({"do": "run", "key": "a", "stats": list(entry.stats)}, rows, seconds=60)
    assert isinstance(answer, tuple), answer
    head, table = answer
    assert head == {"errors": {}}
    assert table is not None
    return table.to_pylist()


@pytest.mark.parametrize("op", sorted(juicer_table().ops))
def test_the_operator_judges_each_row_alone(juicer, op):
    found = ran(juicer, op, TEXTS, **ARGS.get(op, {}))
    if "fields" not in juicer_table().ops[op].reads:  # the field is the row's place, which is another alone
        assert [results(juicer, op, [text])[0] for text in TEXTS] == found


@pytest.mark.parametrize("op", sorted(juicer_table().ops))
def test_the_operator_runs_on_any_text_as_the_table_says(juicer, op):
    found = ran(juicer, op, TEXTS, **ARGS.get(op, {}))
    entry = juicer_table().ops[op]
    assert len(found) == len(TEXTS)
    columns = {"keep", *(f"stat:{stat}" for stat in entry.stats)} if entry.effect == "filter" else {"text"}
    assert all(set(result) == columns for result in found)
    assert all(value is not None for result in found for value in result.values())


@pytest.mark.parametrize("op", sorted(juicer_table().ops))
def test_the_table_has_exactly_the_arguments_of_the_constructor(juicer, op):
    entry = juicer_table().ops[op]
    everyone = {*made(juicer, "expand_macro_mapper", {"?": 0})["known"], *FILTER_ARGS, "stats_export_path"}
    assert set(made(juicer, op, {"?": 0})["known"]) - everyone - OWN_KEYS == set(entry.args)


def test_what_data_juicers_executor_uses_are_arguments_it_knows(juicer):
    known = set(made(juicer, "text_length_filter", {"?": 0})["known"])
    assert set(MANAGED_ARGS) | set(FILTER_ARGS) <= known


@pytest.mark.parametrize(
    ("op", "args", "text", "stat", "keep"),
    [
        ("text_length_filter", {"min_len": 4}, "abc", 3, False),
        ("text_length_filter", {"min_len": 3}, "abc", 3, True),
        ("text_length_filter", {"min_len": 3, "min_closed_interval": False}, "abc", 3, False),
        ("words_num_filter", {"min_num": 2, "max_num": 3}, "a b c", 3, True),
        ("alphanumeric_filter", {"min_ratio": 0.8}, "ab1!", 0.75, False),
        ("average_line_length_filter", {"max_len": 2}, "ab\ncd", 2.5, False),
        ("maximum_line_length_filter", {"min_len": 3}, "abc\nd", 3, True),
        ("special_characters_filter", {"max_ratio": 0.4}, "a!b?", 0.5, False),
        ("word_repetition_filter", {"rep_len": 1, "max_ratio": 0.7}, "a a b", 2 / 3, True),
        ("general_field_filter", {"filter_condition": "text == 'a'"}, "b", 0, False),
    ],
)
def test_a_filter_gives_its_statistic_and_its_verdict(juicer, op, args, text, stat, keep):
    (name,) = juicer_table().ops[op].stats
    assert ran(juicer, op, [text], **args) == [{"keep": keep, f"stat:{name}": pytest.approx(stat)}]


@pytest.mark.parametrize(
    ("op", "args", "text", "mended"),
    [
        ("clean_email_mapper", {}, "mail a@b.com now", "mail  now"),
        ("clean_ip_mapper", {"repl": "<ip>"}, "at 10.0.0.1.", "at <ip>."),
        ("clean_links_mapper", {}, "see https://x.org/a now", "see  now"),
        ("whitespace_normalization_mapper", {}, " a\u00a0b\u2003c ", "a b c"),
        ("punctuation_normalization_mapper", {}, "“a”，b。", '"a",b.'),
        ("remove_specific_chars_mapper", {"chars_to_remove": "xy"}, "axbyc", "abc"),
        ("replace_content_mapper", {"pattern": "a+", "repl": "b"}, "aac", "bc"),
        ("remove_long_words_mapper", {"max_len": 3}, "abc abcd ab", "abc ab"),
        ("fix_unicode_mapper", {}, "schÃ¶n", "schön"),
        ("chinese_convert_mapper", {"mode": "s2t"}, "汉字", "漢字"),
        ("clean_html_mapper", {}, "<p>a <b>b</b></p>", "a b"),
        ("pii_redaction_mapper", {"email_replacement": "<e>"}, "to a@b.com", "to <e>"),
    ],
)
def test_a_mapper_changes_the_text(juicer, op, args, text, mended):
    assert ran(juicer, op, [text], **args) == [{"text": mended}]


NATIVE_ARGS: dict[str, list[dict[str, Any]]] = {
    "text_length_filter": [{}, {"min_len": 3, "max_len": 12}],
    "clean_email_mapper": [{}, {"repl": "<$1>"}],
    "clean_ip_mapper": [{}, {"repl": "$$"}],
}
"""Arguments with which native operators are compared with those they stand for."""


@pytest.mark.parametrize(("op", "args"), [(op, args) for op in NATIVE for args in NATIVE_ARGS[op]])
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(texts=st.lists(
    st.lists(st.sampled_from(["a", "B", "@", ".", ":", "-", "1", "٣", "25", "10.0.0.", "f", "ß", "\n", "a@b.c", "$1"]))
    .map("".join) | st.text(),
    min_size=1, max_size=30,
))  # fmt: skip
def test_a_native_counterpart_gives_the_same_answer_to_every_text(juicer, op, args, texts):
    entry = NATIVE[op](args, "response")
    assert entry is not None
    theirs = ran(juicer, op, texts, **args)
    ours = apply(entry.pop("type"), frame({"response": texts}), **entry)
    if ours.verdicts is not None:
        dropped = set(ours.verdicts["row"].to_list())
        assert [row not in dropped for row in range(len(texts))] == [result["keep"] for result in theirs]
    else:
        assert ours.columns["response"].to_list() == [result["text"] for result in theirs]
