"""Each shipped operator on rows small enough to check by hand."""

from __future__ import annotations

import json

import polars as pl
import pytest
from operator_rows import apply, config, details, frame, message, reasons
from pydantic import ValidationError

from operators.base import Context
from operators.frame import MESSAGES
from operators.select.sql import Sql


def test_normalize_text_applies_every_form_for_later_operators():
    rows = frame({"response": ["e\u0301\u200b  x\r\n\u00a0y ", "ﬁ “q” — ok…", None]}, {"response": pl.String})
    plain = apply("normalize_text", rows, columns=["response"])
    assert plain.columns["response"].to_list() == ["é x\ny", "ﬁ “q” — ok…", None]
    ascii_marks = apply("normalize_text", rows, columns=["response"], forms=["nfkc", "punct"])
    assert ascii_marks.columns["response"][1] == 'fi "q" - ok...'
    assert plain.verdicts is None


def test_normalize_text_rewrites_imported_dialogues_that_nobody_sampled():
    dirty = [message("user", " a "), message("tool", " t "), message("assistant", "b\u200b")]
    clean = [message("user", "a"), message("assistant", "b")]
    rows = frame(
        {
            "prompt": [" a ", "a", " a ", " a "],
            "response": ["b\u200b", "b", "b\u200b", "b\u200b"],
            "messages": [dirty, clean, dirty, dirty],
            "made_by": ["import", "import", "explorer", "import"],
            "mean_logprob": [None, None, None, -0.5],
        },
        {"messages": MESSAGES, "mean_logprob": pl.Float64()},
    )
    result = apply("normalize_text", rows, rewrite=True)
    assert reasons(result) == {0: "replaced"}
    assert result.added is not None
    assert result.added["parent"].to_list() == [0]
    assert result.added["messages"].to_list() == [
        [message("user", "a"), message("tool", " t "), message("assistant", "b")]
    ]


@pytest.mark.parametrize(
    ("fields", "column", "values", "expected"),
    [
        (
            {"unit": "char", "min": 2, "max": 4},
            "response",
            ["é", "éé", "abcd", "abcde"],
            {0: "too_short", 3: "too_long"},
        ),
        ({"unit": "word", "max": 2}, "response", ["a b", " a  b c ", ""], {1: "too_long"}),
        ({"unit": "token", "min": 1, "max": 3}, "token_count", [0, 1, 3, 4], {0: "too_short", 3: "too_long"}),
        ({"unit": "token", "column": "prompt", "max": 3}, "prompt_length", [3, 4], {1: "too_long"}),
        ({"unit": "turn", "min": 2}, "turns", [1, 2], {0: "too_short"}),
        ({"unit": "char", "column": "note", "max": 9}, "note", ["x", None], {1: "null"}),
    ],
)
def test_length_filter_keeps_both_limits(fields, column, values, expected):
    assert reasons(apply("length_filter", frame({column: values}), **fields)) == expected


def test_length_filter_says_the_number_and_the_limit():
    result = apply("length_filter", frame({"response": ["abc", "a"]}), min=2, max=2)
    assert details(result) == {0: "3 chars > max 2", 1: "1 chars < min 2"}


def test_length_filter_refuses_limits_that_leave_nothing():
    with pytest.raises(ValidationError, match="no row could stay"):
        config("length_filter", min=3, max=2)
    with pytest.raises(ValidationError, match="give min, max or both"):
        config("length_filter")


def test_reward_filter_rejects_out_of_range_and_unscored_rows():
    rows = frame({"reward": [-0.1, 0.0, 1.0, 1.1, None, float("nan")]})
    assert reasons(apply("reward_filter", rows, min=0, max=1)) == {0: "too_low", 3: "too_high", 4: "null", 5: "null"}


def test_staleness_filter_counts_weight_versions():
    rows = frame({"model_version": [10, 8, 7, None]})
    result = apply("staleness_filter", rows, max_lag=2)  # the current version is 10
    assert reasons(result) == {2: "stale"}
    assert details(result) == {2: "lag 3 > max_lag 2"}


def test_truncated_mask_masks_and_keeps():
    result = apply("truncated_mask", frame({"truncated": [True, False], "stop_reason": ["length", "eos"]}))
    assert result.verdicts is not None
    assert result.verdicts.rows() == [(0, "mask", "truncated", "length", None)]


@pytest.mark.parametrize(
    ("fields", "answers", "golds", "expected"),
    [
        ({}, [" 4 ", "5", "4", ""], ["4", "4", None, ""], [1.0, 0.0, None, 1.0]),
        ({"strip": False}, [" 4"], ["4"], [0.0]),
        ({"ignore_case": True}, ["YES"], ["yes"], [1.0]),
        ({"extract": r"#### (\d+)"}, ["#### 3 then #### 4", "4"], ["4", "4"], [1.0, 0.0]),
        ({"mode": "contains"}, ["it is 4.", "it is 5"], ["4.", "4."], [1.0, 0.0]),
        ({"mode": "regex"}, ["42", "a42"], [r"\d+", r"\d+"], [1.0, 0.0]),
        ({"mode": "regex", "ignore_case": True}, ["ABC"], ["a.c"], [1.0]),
        # found: the, cat, sat; gold: cat, sat, down, now: 2 shared, precision 2/3, recall 2/4, F1 = 4/7
        ({"mode": "f1"}, ["the cat sat", "dog", "", "a"], ["cat sat down now", "cat", "", None], [4 / 7, 0, 1, None]),
    ],
)
def test_regex_or_exact_match_compares_with_gold(fields, answers, golds, expected):
    rows = frame({"response": answers, "answer": golds}, {"answer": pl.String})
    result = apply("regex_or_exact_match", rows, id="right", gold="answer", **fields)
    assert result.scores["right"].to_list() == pytest.approx(expected)
    assert not result.errors


def test_regex_or_exact_match_reads_numbers_by_their_text():
    result = apply("regex_or_exact_match", frame({"response": ["4", "5"], "n": [4, 4]}), gold="n")
    assert result.scores["regex_or_exact_match"].to_list() == [1.0, 0.0]


def test_regex_or_exact_match_calls_an_invalid_gold_pattern_an_error_of_its_row():
    rows = frame({"response": ["a", "a"], "answer": ["(", "a"]})
    result = apply("regex_or_exact_match", rows, gold="answer", mode="regex")
    assert [error.row for error in result.errors] == [0]
    assert result.scores["regex_or_exact_match"].to_list() == [None, 1.0]


@pytest.mark.parametrize("pattern", ["(", r"\d+", r"(\d)(\d)", r"(?=x)(y)"])
def test_extract_needs_a_valid_pattern_with_one_group(pattern):
    with pytest.raises(ValidationError, match="extract"):
        config("regex_or_exact_match", gold="answer", extract=pattern)


def test_math_verify_knows_equal_mathematics_and_ends_what_hangs():
    hard = "$10^{10^{10}}$"  # ten billion digits: neither time nor memory would do
    rows = frame(
        {
            "response": ["$\\frac{2}{4}$", "0.5", "1/3", "no idea", "0.5", hard, "$0.5$"],
            "answer": ["\\frac{1}{2}", "$1/2$", "0.5", "0.5", None, "5", "1/2"],
        }
    )
    result = apply("math_verify", rows, gold="answer", timeout_seconds=1.0)
    values = result.scores["math_verify"].to_list()
    assert values[:5] == [1.0, 1.0, 0.0, 0.0, None]
    assert values[6] == 1.0  # the row after the one that hung
    assert [(error.row, error.message) for error in result.errors] == [
        (5, "timeout: the comparison took longer than 1 s")
    ]


def test_reasoning_gym_answer_asks_the_tasks_own_verifier():
    info = json.dumps({"dataset": "chain_sum", "question": "1+2", "answer": "3", "metadata": {}})
    rows = frame(
        {
            "response": ["I add. Answer: 3", "Answer: 4", "three", "Answer: 3", "Answer: 3"],
            "task_info": [info, info, info, "{}", '{"dataset": "no_such_dataset"}'],
        }
    )
    result = apply("reasoning_gym_answer", rows, extract=r"Answer: (\S+)")
    assert result.scores["reasoning_gym_answer"].to_list() == [1.0, 0.0, 0.0, None, None]
    assert [error.row for error in result.errors] == [3, 4]
    assert "no key `dataset`" in result.errors[0].message


def test_parsable_and_ended_are_metrics_without_weight():
    rows = frame({"response": ["Answer: 3", "3", "x Answer: 3"], "eos_sampled": [True, False, None]})
    assert apply("parsable", rows, pattern=r"Answer: \d").scores["parsable"].to_list() == [1.0, 0.0, 1.0]
    assert apply("parsable", rows, pattern=r"Answer: \d", mode="full").scores["parsable"].to_list() == [1.0, 0.0, 0.0]
    assert apply("ended", rows).scores["ended"].to_list() == [1.0, 0.0, None]
    assert config("parsable", pattern="x").weight == config("ended").weight == 0.0


def test_reward_shape_evaluates_and_clips():
    rows = frame({"reward": [1.0, 0.0, None, 3.0], "token_count": [10, 300, 1, 1]})
    expr = "reward - CASE WHEN token_count > 200 THEN 0.25 ELSE 0 END"
    assert apply("reward_shape", rows, expr=expr).scores["reward_shape"].to_list() == [1.0, -0.25, None, 3.0]
    clipped = apply("reward_shape", rows, expr=expr, clip=[-0.1, 2.0])
    assert clipped.scores["reward_shape"].to_list() == [1.0, -0.1, None, 2.0]


def test_reward_shape_calls_division_by_zero_an_error_of_its_row():
    result = apply("reward_shape", frame({"reward": [1.0, 0.0]}), expr="1.0 / reward")
    assert [error.row for error in result.errors] == [1]
    assert result.scores["reward_shape"].to_list() == [1.0, None]


@pytest.mark.parametrize("expr", ["AVG(reward)", "reward - AVG(reward)", "SUM(reward) OVER (PARTITION BY group_id)"])
def test_reward_shape_refuses_to_look_at_other_rows(expr):
    with pytest.raises(ValidationError, match="looks at other rows"):
        config("reward_shape", expr=expr)


def test_overlong_penalty_has_the_values_of_the_dapo_formula():
    # L_max = 100, L_cache = 20: free to 80, then (80 - n) / 20, then -1
    rows = frame({"token_count": [0, 80, 81, 85, 90, 99, 100, 101, 5000]})
    result = apply("overlong_penalty", rows, max=100, cache=20)
    expected = [0.0, 0.0, -0.05, -0.25, -0.5, -0.95, -1.0, -1.0, -1.0]
    assert result.scores["overlong_penalty"].to_list() == pytest.approx(expected)


def test_exact_dedup_keeps_the_first_sample_and_names_it():
    rows = frame(
        {
            "prompt": ["p", "p", "p", "q"],
            "response": ["a  b", "a b", "A b", "a b"],
            "sample_index": [2, 1, 0, 0],
        }
    )
    result = apply("exact_dedup", rows)
    assert reasons(result) == {0: "duplicate"}
    assert result.verdicts is not None
    assert result.verdicts["ref_id"].to_list() == ["x1"]
    assert reasons(apply("exact_dedup", rows, normalize=["ws", "case"])) == {0: "duplicate", 1: "duplicate"}
    assert reasons(apply("exact_dedup", rows, normalize=[])) == {}


def test_exact_dedup_keeps_the_best_and_respects_its_scope():
    rows = frame(
        {"response": ["a", "a", "a"], "sample_index": [0, 1, 2], "right": [None, 1.0, 0.0], "kind": ["u", "u", "v"]}
    )
    best = apply("exact_dedup", rows, columns=["response"], keep="best", by="right")
    assert reasons(best) == {0: "duplicate", 2: "duplicate"}
    scoped = apply("exact_dedup", rows, columns=["response"], scope=["kind"])
    assert reasons(scoped) == {1: "duplicate"}


def test_exact_dedup_compares_with_what_earlier_passes_kept():
    past = pl.DataFrame({"experience_id": ["old"], "response": [" a"]})
    context = Context(seed=1, model_version=1, step=1, history=lambda columns: past.select("experience_id", *columns))
    rows = frame({"response": ["a", "b"], "sample_index": [0, 1]})
    result = apply("exact_dedup", rows, context, columns=["response"])
    assert result.verdicts is not None
    assert result.verdicts.rows() == [(0, "reject", "duplicate", "same response", "old")]
    assert reasons(apply("exact_dedup", rows, context, columns=["response"], history=False)) == {}


def test_group_reward_std_rejects_what_teaches_nothing():
    rows = frame(
        {
            "group_id": ["flat", "flat", "spread", "spread", "one", "one", "none", "tiny", "tiny"],
            "reward": [1.0, 1.0, 0.0, 1.0, 1.0, None, None, 0.0, 1e-7],
        }
    )
    expected = {0: "all_equal", 1: "all_equal", 4: "singleton", 5: "null", 6: "null", 7: "low_std", 8: "low_std"}
    assert reasons(apply("group_reward_std", rows)) == expected
    assert reasons(apply("group_reward_std", rows, min_std=0)) == {
        row: reason for row, reason in expected.items() if reason != "low_std"
    }


def test_group_reward_std_takes_rounding_for_equal_when_min_std_is_zero():
    # 0.1 + 0.2 and 0.3 differ by 5.6e-17 in float64: no spread
    rows = frame({"reward": [0.1 + 0.2, 0.3]})
    assert reasons(apply("group_reward_std", rows, min_std=0)) == {0: "all_equal", 1: "all_equal"}


def test_group_reward_std_over_all_counts_the_dead_and_judges_the_living():
    rows = frame({"reward": [0.0, 1.0, 1.0], "alive": [False, True, True]})
    assert reasons(apply("group_reward_std", rows, over="all")) == {}
    flat = frame({"reward": [1.0, 1.0], "alive": [False, True]})
    assert reasons(apply("group_reward_std", flat, over="all")) == {1: "all_equal"}


def test_sql_keeps_what_a_condition_keeps():
    rows = frame({"token_count": [1, 5, None], "answer": ["a", "a", "a"]}, {"token_count": pl.Int64})
    assert reasons(apply("sql", rows, keep_where="token_count > 2 AND answer = 'a'", reason="short")) == {
        0: "short",
        2: "short",
    }


def test_a_row_that_sql_rejects_says_which_condition_it_failed():
    rows = frame({"token_count": [1, 5]})
    [told] = apply("sql", rows, keep_where="token_count\n  > 2").verdicts["detail"].to_list()
    assert told == "not (token_count > 2)"
    [told] = (
        apply("sql", rows, keep_where="token_count > 2 AND " + "true AND " * 20 + "true").verdicts["detail"].to_list()
    )
    assert (len(told), told[:25], told[-1]) == (120, "not (token_count > 2 AND ", "…")
    query = "SELECT experience_id, 'hold' AS verdict, 'look' AS detail FROM rows WHERE token_count > 2"
    found = apply("sql", rows, query=query, columns=["token_count"]).verdicts
    # What the query says about a row it returns stays; a row it does not return names the query.
    assert found["detail"].to_list() == [f"not in: {query}", "look"]


def test_sql_query_gives_verdicts_reasons_and_a_score():
    rows = frame({"token_count": [1, 2, 3, 4]})
    query = """
        SELECT experience_id, CASE token_count WHEN 1 THEN 'hold' WHEN 2 THEN 'mask' WHEN 3 THEN 'keep' END AS verdict,
               'look' AS reason, token_count - avg(token_count) OVER () AS score
        FROM rows WHERE token_count < 4
    """
    result = apply("sql", rows, id="q", query=query, columns=["token_count"], score=True)
    assert result.verdicts is not None
    assert result.verdicts.select("row", "verdict", "reason").rows() == [
        (0, "hold", "look"),
        (1, "mask", "look"),
        (3, "reject", "not_selected"),
    ]
    # the window is computed after WHERE: the mean of 1, 2, 3 is 2
    assert result.scores["q"].to_list() == [-1.0, 0.0, 1.0, None]
    assert result.scored is not None
    assert result.scored.to_list() == [True, True, True, False]


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ("SELECT experience_id FROM read_csv('/etc/passwd')", "file system operations are disabled"),
        ("ATTACH '/tmp/other.db'", "file system operations are disabled"),
        ("SELECT experience_id FROM frame", "Table with name frame does not exist"),
        ("SELECT experience_id, 1 AS other FROM rows", "returns 'other'"),
        ("SELECT reason FROM (SELECT 'x' AS reason)", "does not return 'experience_id'"),
        ("SELECT 'stranger' AS experience_id", "'stranger', which is no row"),
        ("SELECT experience_id FROM rows UNION ALL SELECT experience_id FROM rows", "more than once"),
    ],
)
def test_sql_sees_only_its_rows_and_must_return_them_once(query, complaint):
    with pytest.raises(Exception, match=complaint):
        apply("sql", frame({"token_count": [1]}), query=query, columns=["token_count"])


def test_sql_finds_the_columns_of_a_condition_itself():
    operator = Sql(config("sql", keep_where="token_count > 3 AND lower(answer) = 'token_x' OR rows.reward > 0"))
    assert operator.contract().reads == {"token_count", "answer", "reward"}
    with pytest.raises(ValidationError, match="not a SQL condition"):
        config("sql", keep_where="token_count >")


def test_sql_takes_one_statement():
    with pytest.raises(ValueError, match="2 statements"):
        apply("sql", frame({"response": ["a"]}), query="SELECT 1; SELECT experience_id FROM rows", columns=["response"])
