"""Operators that filter texts, on texts small enough to measure by hand."""

from __future__ import annotations

import json

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_rows import apply, config, details, frame, reasons
from pydantic import ValidationError

from buffer_engine.errors import OperatorError

NOTHING = {
    "lines": None, "line_chars": None, "paragraphs": None, "paragraph_chars": None, "top_ngrams": {},
    "repeated_ngrams": {}, "min_words": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "rule", "reason", "detail"),
    [
        # 4 lines, one repeats: 1/4; characters 2 + 1 + 2 + 5 = 10, repeated 2
        ("ab\nc\n ab \n\nlong!", {"lines": 0.24}, "lines", "share 0.25 > 0.24"),
        ("ab\nc\n ab \n\nlong!", {"lines": 0.25}, None, None),
        ("ab\nc\n ab \n\nlong!", {"line_chars": 0.1}, "line_chars", "share 0.2 > 0.1"),
        # 3 paragraphs, one repeats: 1/3
        ("a\nb\n\nc\n \n\na\nb", {"paragraphs": 0.3}, "paragraphs", "share 0.3333 > 0.3"),
        # words a b a b cc: "a b" twice, words 1 to 4 lie in it: 4 of 6 characters
        ("a b a b cc", {"top_ngrams": {2: 0.5}}, "top_2gram", "share 0.6667 > 0.5"),
        # "a a" at words 1, 2 and 3 of a a a a b: overlapping, 4 of 5 characters
        ("a a a a b", {"top_ngrams": {2: 0.7}}, "top_2gram", "share 0.8 > 0.7"),
        ("a b c d", {"top_ngrams": {2: 0.0}}, None, None),
        # "a b" occurs again once: its second occurrence has 2 of 6 characters
        ("a b a b cc", {"repeated_ngrams": {2: 0.3}}, "repeated_2gram", "share 0.3333 > 0.3"),
        # "a a" occurs again at words 2 and 3: words 2, 3, 4 lie in it, each once: 3 of 5
        ("a a a a b", {"repeated_ngrams": {2: 0.5}}, "repeated_2gram", "share 0.6 > 0.5"),
        ("a a a a b", {"repeated_ngrams": {2: 0.5}, "min_words": 6}, None, None),
        ("", {"lines": 0.0, "repeated_ngrams": {1: 0.0}}, None, None),
        (None, {"lines": 0.0}, "null", None),
    ],
)
def test_repetition_filter_measures_the_shares_of_gopher(text, rule, reason, detail):
    rows = frame({"response": [text, "one two"]}, {"response": pl.String})
    result = apply("repetition_filter", rows, **(NOTHING | rule))
    assert reasons(result) == ({} if reason is None else {0: reason})
    assert details(result).get(0) == detail


def test_repetition_filter_judges_each_text_alone():
    loop = "I will think about it again. " * 12
    rows = frame({"response": ["a fine answer of a few words", loop, "a fine answer of a few words"]})
    assert reasons(apply("repetition_filter", rows)) == {1: "top_2gram"}


@pytest.mark.parametrize(
    ("text", "limits", "reason", "detail"),
    [
        ("ab 12 !!", {"alnum": [0.7, None]}, "low_alnum", "0.6667 < 0.7"),  # 4 of 6
        ("ab 12 !!", {"digits": [None, 0.3]}, "high_digits", "0.3333 > 0.3"),  # 2 of 6
        ("ABc é", {"uppercase": [None, 0.5]}, None, None),  # 2 of 4 letters
        ("ABC é", {"uppercase": [None, 0.5]}, "high_uppercase", "0.75 > 0.5"),
        ("ok ☃☃", {"special": [None, 0.4]}, "high_special", "0.5 > 0.4"),
        ("x = a + b | c < 2", {"special": [None, 0.0]}, None, None),
        ("a bbb", {"word_length": [2.5, None]}, "low_word_length", "2 < 2.5"),
        ("ab\n\nabcd", {"line_length": [None, 2]}, "high_line_length", "3 > 2"),
        ("ab\n  abcd  ", {"longest_line": [None, 3]}, "high_longest_line", "4 > 3"),
        ("- a\n* b\nc\nd", {"bullet_lines": [None, 0.4]}, "high_bullet_lines", "0.5 > 0.4"),
        ("a...\nb…\nc.", {"ellipses": [None, 0.5]}, "high_ellipses", "0.6667 > 0.5"),
        ("!!", {"uppercase": [0.5, None]}, None, None),  # no letters, no share of them
        (" \n", {"alnum": [0.1, None]}, "empty", None),
        (None, {}, "null", None),
    ],
)
def test_text_quality_filter_measures_characters_words_and_lines(text, limits, reason, detail):
    rows = frame({"response": [text]}, {"response": pl.String})
    result = apply("text_quality_filter", rows, preset="none", limits=limits)
    assert reasons(result) == ({} if reason is None else {0: reason})
    if detail is not None:
        assert details(result)[0].replace(".0 ", " ") == detail


def test_text_quality_presets_keep_what_they_are_for():
    rows = frame(
        {
            "response": [
                "The answer is $x^2 + 1 = 4$, so \\boxed{3}.",
                "答えは四です。",
                "def f(x):\n    return [y for y in x if y > 0]\n",
                "☃☃☃☃ ok",
            ]
        }
    )
    assert reasons(apply("text_quality_filter", rows)) == {3: "low_alnum"}
    assert 2 not in reasons(apply("text_quality_filter", rows, preset="code"))
    loose = apply("text_quality_filter", rows, limits={"alnum": [None, None], "special": [None, None]})
    assert reasons(loose) == {}


def benchmark(tmp_path, *texts):
    file = tmp_path / "bench.jsonl"
    file.write_text("".join(json.dumps({"question": text, "name": f"q{n}"}) + "\n" for n, text in enumerate(texts)))
    return str(file)


def test_decontaminate_names_the_item_with_the_most_shared_runs(tmp_path):
    file = benchmark(tmp_path, "one two three four five six", "two three four five six seven", "short item")
    rows = frame(
        {
            "prompt": [
                "Say: Two, three; FOUR five six seven!",  # item 1 in 3 runs of four words, item 0 in 2
                "one two three four",  # one run of item 0
                "two three five four six one",
                None,
            ]
        },
        {"prompt": pl.String},
    )
    result = apply("decontaminate", rows, benchmarks=[{"path": file, "id": "name"}], n=4, min_words=4)
    assert result.verdicts is not None
    assert result.verdicts.rows() == [
        (0, "reject", "contaminated", "3 shared runs of words", "bench.jsonl:q1"),
        (1, "reject", "contaminated", "1 shared runs of words", "bench.jsonl:q0"),
    ]
    twice = apply("decontaminate", rows, benchmarks=[{"path": file}], n=4, min_words=4, min_hits=2)
    assert result.verdicts["row"].to_list() == [0, 1]
    assert twice.verdicts is not None
    assert twice.verdicts.select("row", "ref_id").rows() == [(0, "bench.jsonl:1")]


def test_decontaminate_takes_a_short_item_as_one_run(tmp_path):
    file = benchmark(tmp_path, "what is the capital of France", "a b")
    rows = frame({"prompt": ["Q: What is the capital of France?", "what is the capital of Spain", "a b"]})
    fields = {"benchmarks": [{"path": file}], "n": 13, "min_words": 6}
    assert reasons(apply("decontaminate", rows, **fields)) == {0: "contaminated"}
    with pytest.raises(OperatorError, match="no item of the benchmarks has 8 words"):
        apply("decontaminate", rows, benchmarks=[{"path": file}])
    with pytest.raises(OperatorError, match="has no column 'text'"):
        apply("decontaminate", rows, benchmarks=[{"path": file, "column": "text"}])
    with pytest.raises(ValidationError, match="min_words 5 is greater than n 4"):
        config("decontaminate", benchmarks=[{"path": file}], n=4, min_words=5)


def naive_shares(words: list[str], length: int) -> tuple[float, float]:
    """Shares of the most frequent run and of runs that occurred before, position by position."""
    runs = [" ".join(words[at : at + length]) for at in range(len(words) - length + 1)]
    total = sum(map(len, words))

    def share(starts: list[int]) -> float:
        inside = {at + step for at in starts for step in range(length)}
        return sum(len(words[at]) for at in inside) / total

    often = sorted({run for run in runs if runs.count(run) > 1}, key=lambda run: (-runs.count(run), -len(run), run))
    top = [at for at, run in enumerate(runs) if often and run == often[0]]
    return share(top), share([at for at, run in enumerate(runs) if run in runs[:at]])


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.lists(st.sampled_from(["a", "b", "cc", "é"]), min_size=1, max_size=14), min_size=1, max_size=4),
    lengths=st.sets(st.integers(1, 4), min_size=1),
)
def test_runs_of_words_have_the_shares_that_counting_by_hand_gives(texts, lengths):
    rows = frame({"response": [" ".join(words) for words in texts]})
    for length in lengths:
        for place, name in enumerate(("top_ngrams", "repeated_ngrams")):
            shares = [naive_shares(words, length)[place] for words in texts]
            for limit in {0.0, 0.5, *(round(share, 3) for share in shares if share < 0.99)}:
                others = dict.fromkeys(lengths, 1.0)
                found = reasons(apply("repetition_filter", rows, **(NOTHING | {name: others | {length: limit}})))
                assert set(found) == {row for row, share in enumerate(shares) if share > limit}
