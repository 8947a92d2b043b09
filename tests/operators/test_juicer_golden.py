"""Filters and mappers of Data-Juicer in a pass, on texts small enough to judge by hand."""

from __future__ import annotations

from typing import Any

import polars as pl
from juicer_python import juicer_python
from operator_rows import apply, config, details, frame, reasons

from operators.engine import CurationResult, run_operators
from operators.plan import compile_operators
from operators.testing import sample_frame


def passed(*entries: dict[str, Any]) -> CurationResult:
    """A whole pass over rows whose replies are known."""
    replies = ["to a@b.com", "one two three", "x", "a b"]
    rows = sample_frame().head(4).with_columns(pl.Series("response", replies), error=pl.lit(None, pl.String))
    configs = [config("data_juicer", python=juicer_python(), **entry) for entry in entries]
    with compile_operators(configs, available={}, has_reward=True) as plan:
        return run_operators(plan, rows, seed=1, step=1, model_version=1, pass_id="p", run_id="r")


def test_a_pass_stores_statistics_as_scores_and_drops_as_decisions():
    result = passed(
        {"op": "clean_email_mapper", "args": {"repl": "you"}, "id": "mails"},
        {"op": "words_num_filter", "args": {"min_num": 2, "max_num": 2}, "id": "words"},
        {"op": "text_length_filter", "args": {"min_len": 4}, "id": "length", "weight": 0.5},
    )
    scores = pl.from_arrow(result.scores).select("experience_id", "name", "value", "weight").rows()
    assert scores == [
        ("x0", "words", 2.0, None), ("x1", "words", 3.0, None), ("x2", "words", 1.0, None), ("x3", "words", 2.0, None),
        ("x0", "length", 6.0, 0.5), ("x3", "length", 3.0, 0.5),
    ]  # fmt: skip
    decisions = pl.from_arrow(result.decisions).select("experience_id", "verdict", "operator", "reason", "detail")
    assert decisions.sort("experience_id").rows() == [
        ("x0", "keep", "pipeline", "kept", None),
        ("x1", "reject", "words", "words_num_filter", "num_words 3; min_num: 2, max_num: 2"),
        ("x2", "reject", "words", "words_num_filter", "num_words 1; min_num: 2, max_num: 2"),
        ("x3", "reject", "length", "text_length_filter", "text_len 3; min_len: 4"),
    ]
    assert result.survivors.select("response", "reward").rows() == [("to you", 3.0)]


def test_a_filter_sees_further_fields_under_their_names():
    rows = frame({"response": ["a", "b", None], "token_count": [1, 5, 5]}, {"response": pl.String})
    given = {"python": juicer_python(), "fields": {"n": "token_count"}}
    condition = {"filter_condition": "n > 3 and text == 'b'"}
    both = apply("data_juicer", rows, op="general_field_filter", args=condition, **given)
    assert reasons(both) == {0: "general_field_filter", 2: "null"}
    assert both.scores["data_juicer"].to_list() == [0.0, 1.0, None]
    limits = {"field_key": "n", "min_value": 3}
    field = apply("data_juicer", rows, op="specified_numeric_field_filter", args=limits, **given)
    assert reasons(field) == {0: "specified_numeric_field_filter"}
    assert details(field) == {0: 'no statistic; field_key: "n", min_value: 3'}


def test_statistics_of_an_operator_outside_the_table_are_named_by_the_entry():
    rows = frame({"response": ["abc", "a\nb"]})
    given = {"op": "audio_size_filter", "effect": "filter", "stats": ["audio_sizes", "other"], "id": "sizes"}
    result = apply("data_juicer", rows, python=juicer_python(), **given)
    assert {name: series.to_list() for name, series in result.scores.items()} == {
        "sizes_audio_sizes": [None, None],
        "sizes_other": [None, None],
    }
    assert reasons(result) == {}
