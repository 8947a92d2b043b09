"""Every registered operator keeps the public contract, on a fixed frame and on any frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from juicer_python import juicer_python
from odd_operators import Failing, FailingConfig, Sneaky, SneakyConfig
from operator_rows import config

from operators.base import OperatorConfig
from operators.frame import FRAME_COLUMNS
from operators.registry import OPERATORS
from operators.testing import check_operator, hostile_frame, sample_frame

COLUMNS = {"answer": pl.String(), "tools": pl.String()}
"""Info keys of the rows that the operators are tried on."""

DATA = Path(__file__).parent / "data"
BENCHMARK, REWARDS = str(DATA / "benchmark.jsonl"), str(DATA / "rewards.csv")

STATIC = str(DATA / "static")

CASES: list[tuple[str, dict[str, Any]]] = [
    ("normalize_text", {"forms": ["nfkc", "ctrl", "punct", "ws"]}),
    ("normalize_text", {"rewrite": True, "columns": ["response"]}),
    ("replace_pattern", {"rules": [{"pattern": r"(\d)", "new": "$1$1"}, {"pattern": "a", "literal": True}]}),
    ("replace_pattern", {"rewrite": True, "rules": [{"pattern": "4", "new": "5"}]}),
    ("strip_markup", {}),
    ("strip_markup", {"rewrite": True, "keep_code": False}),
    ("fix_mojibake", {}),
    ("redact_pii", {"counts": True}),
    ("redact_pii", {"mode": "drop", "types": ["email", "phone", "path"]}),
    ("trim_boilerplate", {}),
    ("extract_reasoning", {"open": "The", "close": "4", "unclosed": "reject"}),
    ("schema_check", {"columns": {"answer": {"pattern": r"\d+", "max": 1}, "token_count": {"type": "integer", "max": 2},
                                  "truncated": {"choices": [False]}}}),
    ("schema_check", {"columns": {"reward": {"nullable": True, "min": 0.5}}}),
    ("messages_check", {}),
    ("messages_check", {"roles": ["user"], "last": ["user"], "alternate": False, "allow_empty": True}),
    ("json_answer_check", {"into": "parsed", "json_schema": {"type": "integer"}}),
    ("json_answer_check", {"extract": "whole"}),
    ("tool_call_check", {"tools_column": "tools"}),
    ("tool_call_check", {"tools_column": "tools", "calls": "tags", "tags": ["a", "4"]}),
    ("length_filter", {"unit": "char", "min": 1, "max": 5}),
    ("length_filter", {"unit": "word", "max": 2}),
    ("length_filter", {"unit": "token", "min": 1}),
    ("length_filter", {"unit": "turn", "min": 1}),
    ("repetition_filter", {"min_words": 1}),
    ("repetition_filter", {"column": "answer", "lines": None, "line_chars": None, "top_ngrams": {1: 0.1},
                           "repeated_ngrams": {}}),
    ("text_quality_filter", {}),
    ("text_quality_filter", {"preset": "web", "column": "answer"}),
    ("text_quality_filter", {"preset": "none", "limits": {"digits": [0.1, 0.9], "line_length": [2, None]}}),
    ("decontaminate", {"benchmarks": [{"path": BENCHMARK}], "columns": ["prompt", "response"], "n": 2, "min_words": 1}),
    ("dynamic_sampling", {}),
    ("dynamic_sampling", {"over": "all", "threshold": 0.5}),
    ("group_complete", {}),
    ("group_complete", {"over": "all", "min": 2, "max": 2, "verdict": "hold"}),
    ("group_reward_range", {"min": 0.2, "max": 0.8}),
    ("group_reward_range", {"statistic": "range", "min": 0.5, "over": "all"}),
    ("pass_rate", {}),
    ("pass_rate", {"by": "task", "threshold": 0.5}),
    ("reward_normalize", {"column": "reward"}),
    ("reward_normalize", {"column": "reward", "method": "rank", "by": "batch"}),
    ("reward_normalize", {"column": "reward", "method": "leave_one_out"}),
    ("reward_normalize", {"column": "reward", "method": "minmax"}),
    ("reward_inject", {"path": REWARDS}),
    ("reward_inject", {"path": REWARDS, "missing": "reject"}),
    ("reward_inject", {"path": REWARDS, "missing": "hold", "conflicts": "mean"}),
    ("credit_assign", {"column": "reward", "gamma": 0.9}),
    ("credit_assign", {"column": "reward", "method": "uniform"}),
    ("balance_sample", {"by": "answer"}),
    ("balance_sample", {"by": "made_by", "target": {"import": 2, "explorer": 1}, "unit": "row", "max_units": 3}),
    ("balance_sample", {"max_units": 1}),
    ("curriculum", {"expr": "token_count"}),
    ("curriculum", {"expr": "1 - reward", "method": "band", "low": 0.2, "high": 0.8}),
    ("curriculum", {"expr": "reward", "method": "top_k", "k": 1, "order": "hard_first"}),
    ("curriculum", {"expr": "token_count", "method": "fold", "layers": 2}),
    ("to_preference_pairs", {}),
    ("to_preference_pairs", {"column": "token_count", "strategy": "all", "max_pairs": None, "originals": "keep"}),
    ("token_mask_rebuild", {"last_replies": 1, "truncated": "mask"}),
    ("token_mask_rebuild", {"truncated": "reject"}),
    ("regroup_turns", {}),
    ("regroup_turns", {"direction": "join", "broken": "reject"}),
    ("regroup_turns", {"direction": "split"}),
    ("window_turns", {"max": 1, "unit": "word", "sampled": "reject"}),
    ("window_turns", {"max": 1, "unit": "turn", "overlap": 0}),
    ("window_turns", {"max": 3}),
    ("language_filter", {"keep": ["en", "und"], "into": "language"}),
    ("near_dedup", {"shingle": 1, "threshold": 0.5}),
    ("near_dedup", {"column": "answer", "keep": "best", "by": "reward", "scope": ["made_by"]}),
    ("semantic_dedup", {"model": STATIC, "column": "response", "threshold": 0.95}),
    ("polars", {"expr": "pl.col('response').str.len_chars() > 2"}),
    ("polars", {"expr": "pl.col('token_count') - pl.col('token_count').mean()", "scope": "group", "use": "score"}),
    ("polars", {"expr": "pl.col('token_count').cum_sum()", "scope": "frame", "use": "column", "into": "n",
                "dtype": "integer"}),
    ("python_row", {"function": "row_functions:short", "columns": ["response"]}),
    ("python_row", {"function": "row_functions:length", "columns": ["response"], "use": "score"}),
    ("python_batch", {"function": "row_functions:lengths", "columns": ["response"], "use": "column", "into": "n",
                      "dtype": "integer", "batch_rows": 3}),
    ("augment_prompt", {"copies": 2, "templates": ["{prompt}!", "Q: {prompt}"], "typos": 0.5}),
    ("augment_prompt", {"case": "upper"}),
    ("reward_filter", {"min": 0.5}),
    ("staleness_filter", {"max_lag": 2}),
    ("truncated_mask", {}),
    ("regex_or_exact_match", {"gold": "answer"}),
    ("regex_or_exact_match", {"gold": "answer", "mode": "f1", "ignore_case": True}),
    ("regex_or_exact_match", {"gold": "answer", "mode": "contains", "extract": r"(\d+)"}),
    ("regex_or_exact_match", {"gold": "answer", "mode": "regex"}),
    ("math_verify", {"gold": "answer"}),
    ("reasoning_gym_answer", {"extract": r"(\d+)"}),
    ("code_tests", {"tests": "answer"}),
    ("parsable", {"pattern": r"\d"}),
    ("ended", {}),
    ("reward_shape", {"expr": "COALESCE(reward, 0) - 0.1 * token_count", "clip": [-1, 1]}),
    ("overlong_penalty", {"max": 3, "cache": 2}),
    ("exact_dedup", {"columns": ["response"]}),
    ("exact_dedup", {"columns": ["response"], "keep": "best", "by": "reward", "scope": ["made_by"]}),
    ("group_reward_std", {}),
    ("group_reward_std", {"over": "all", "min_std": 0}),
    ("sql", {"keep_where": "token_count > 1"}),
    ("sql", {"query": "SELECT experience_id, 1.5 AS score FROM rows WHERE reward > 0", "columns": ["reward"],
             "score": True}),
    ("data_juicer", {"op": "words_num_filter", "args": {"min_num": 2}}),
    ("data_juicer", {"op": "whitespace_normalization_mapper", "rewrite": True}),
]  # fmt: skip


def operator(kind: str) -> Any:
    """The operator class; skips the test where its optional package is not installed."""
    found = OPERATORS.load(kind)
    for module, _ in found.requires:
        pytest.importorskip(module)
    return found


def configured(kind: str, fields: dict[str, Any]) -> OperatorConfig:
    """The configuration; skips the test where the package of another interpreter is not there."""
    return config(kind, **fields, python=juicer_python()) if kind == "data_juicer" else config(kind, **fields)


def test_the_table_covers_every_registered_operator():
    assert {kind for kind, _ in CASES} == set(OPERATORS.builtin)


@pytest.mark.parametrize(("kind", "fields"), CASES, ids=[f"{kind}-{place}" for place, (kind, _) in enumerate(CASES)])
def test_the_operator_keeps_its_contract(kind, fields):
    check_operator(operator(kind), configured(kind, fields), sample_frame(COLUMNS))


@pytest.mark.parametrize(("kind", "fields"), CASES, ids=[f"{kind}-{place}" for place, (kind, _) in enumerate(CASES)])
def test_the_operator_keeps_its_contract_on_rows_that_break_things(kind, fields):
    check_operator(operator(kind), configured(kind, fields), hostile_frame(COLUMNS))


@pytest.mark.parametrize("kind", sorted(OPERATORS.builtin))
def test_every_field_and_operator_is_described(kind):
    operator = OPERATORS.load(kind)
    assert len(operator.__doc__) > 80
    assert operator.Config.model_config["extra"] == "forbid"
    undescribed = [name for name, entry in operator.Config.model_fields.items() if not entry.description]
    assert undescribed == []


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("state", "when it runs a second time"),
        ("order", "when it sees the rows in another order"),
        ("batch", "when it runs row by row"),
        ("reads", "when it sees columns beside those it reads"),
    ],
)
def test_the_suite_names_what_an_impure_operator_does(how, sentence):
    with pytest.raises(AssertionError, match=sentence):
        check_operator(Sneaky, SneakyConfig(type="sneaky", how=how))


def test_the_suite_passes_a_plain_operator_of_someone_else():
    check_operator(Failing, FailingConfig(type="failing"))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
MESSAGE = st.builds(
    lambda role, content, calls, call_id: {
        "role": role, "content": content, "tool_calls": calls, "tool_call_id": call_id, "media": []
    },
    st.sampled_from(["system", "user", "assistant", "tool"]),
    st.one_of(st.none(), TEXT),
    st.sampled_from([None, None, "[]", '[{"id": "c", "function": {"name": "f", "arguments": "{}"}}]', "{"]),
    st.sampled_from([None, "c"]),
)  # fmt: skip
ROW = st.fixed_dictionaries(
    {
        "response": TEXT, "answer": st.one_of(st.none(), TEXT), "group": st.integers(0, 2), "tokens": st.integers(0, 9),
        "reward": st.one_of(st.none(), st.floats(-1e6, 1e6), st.sampled_from([0.0, 1.0])), "truncated": st.booleans(),
        "messages": st.lists(MESSAGE, max_size=5), "mask": st.lists(st.booleans(), max_size=6),
        "turn": st.integers(0, 2), "sample": st.integers(0, 3), "made_by": st.sampled_from(["explorer", "import"]),
        "sampled": st.booleans(),
    }
)  # fmt: skip
SLOW = ("code_tests", "math_verify", "reasoning_gym_answer", "python_row", "python_batch", "data_juicer")
"""Operators that start processes or load much: not tried on generated rows."""
VECTORISED = [(kind, fields) for kind, fields in CASES if kind not in (*SLOW, "normalize_text")] + [
    ("normalize_text", {"forms": ["nfkc", "ctrl", "punct", "ws"]})
]


@pytest.mark.parametrize(("kind", "fields"), VECTORISED)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=st.lists(ROW, min_size=0, max_size=6))
def test_the_operator_keeps_its_contract_on_any_rows(kind, fields, rows):
    height = len(rows)
    sample = sample_frame(COLUMNS)
    base = sample.clear() if height == 0 else pl.concat([sample.head(1)] * height)
    types = {name: column.dtype for name, column in FRAME_COLUMNS.items()}

    def column(name: str, values: list[Any], dtype: pl.DataType | None = None) -> pl.Series:
        return pl.Series(name, values, dtype or types[name])

    made = base.with_columns(
        column("experience_id", [f"x{row}" for row in range(height)]),
        column("response", [row["response"] for row in rows]),
        column("answer", [row["answer"] for row in rows], pl.String()),
        column("group_id", [f"g{row['group']}" for row in rows]),
        column("token_count", [row["tokens"] for row in rows]),
        column("sample_index", [row["sample"] for row in rows]),
        column("turn_index", [row["turn"] for row in rows]),
        column("reward", [row["reward"] for row in rows]),
        column("truncated", [row["truncated"] for row in rows]),
        column("made_by", [row["made_by"] for row in rows]),
        column("messages", [row["messages"] for row in rows]),
        # the same beginning for all, so that some rows begin with others
        column("token_ids", [list(range(len(row["mask"]))) for row in rows]),
        column("loss_mask", [row["mask"] for row in rows]),
        column("total_tokens", [len(row["mask"]) for row in rows]),
        column("logprobs", [[-1.0] * len(row["mask"]) if row["sampled"] else None for row in rows]),
        column("mean_logprob", [-1.0 if row["sampled"] and row["mask"] else None for row in rows]),
    )
    check_operator(operator(kind), configured(kind, fields), made)
