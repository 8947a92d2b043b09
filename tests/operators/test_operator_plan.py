"""Compiling a pipeline: everything that is wrong is found before a row is read, and all of it at once."""

from __future__ import annotations

import subprocess
import sys

import odd_operators
import polars as pl
import pytest
from operator_rows import config

from buffer_engine.errors import ConfigError, Problem
from operators.plan import compile_operators
from operators.score.math_verify import MathVerify

INFO = {"answer": pl.String(), "level": pl.Int64()}


def problems(*configs, **options) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        compile_operators(configs, available=options.pop("available", INFO), **options)
    return list(caught.value.problems)


def test_a_plan_asks_for_just_the_columns_that_somebody_reads():
    plan = compile_operators(
        [
            config("length_filter", unit="token", max=5),
            config("regex_or_exact_match", id="right", gold="answer", where="level > 1"),
            config("group_reward_std", column="right"),
        ],
        available=INFO,
    )
    assert set(plan.frame_columns) == {
        "experience_id", "task_id", "group_id", "error", "token_count", "response", "answer", "level",
    }  # fmt: skip
    assert plan.ids == ("length_filter", "right", "group_reward_std")
    assert plan.components == ("right",)


def test_a_column_that_nothing_provides_gets_the_nearest_name():
    (problem,) = problems(config("regex_or_exact_match", gold="anwser"))
    assert problem.path == "operators.0.gold"
    assert problem.message == "operator #0 'regex_or_exact_match' reads 'anwser', which nothing provides"
    assert problem.fix == "did you mean 'answer'?"


def test_a_column_that_a_later_operator_writes_says_move_it_up():
    (problem,) = problems(
        config("group_reward_std", column="right"), config("regex_or_exact_match", id="right", gold="answer")
    )
    assert problem.path == "operators.0.column"
    assert problem.message == "operator #0 'group_reward_std' reads 'right', which nothing before it writes"
    assert problem.fix == "operator #1 'right' does: move it up"


def test_a_reward_that_nothing_gives_is_a_problem_unless_the_rows_bring_one():
    match = config("regex_or_exact_match", id="right", gold="answer")
    (problem,) = problems(config("reward_filter", min=0), match)
    assert problem.path == "operators.0.column"
    assert "nothing before it gives a reward" in problem.message
    assert problem.fix == "operator #1 'right' does: move it up"
    compile_operators([match, config("reward_filter", min=0)], available=INFO)
    compile_operators([config("reward_filter", min=0)], available=INFO, has_reward=True)
    (metric_only,) = problems(config("ended"), config("reward_filter", min=0))
    assert metric_only.path == "operators.1.column"


def test_stored_components_are_columns_until_an_operator_rewrites_them():
    compile_operators([config("reward_filter", column="style", min=0)], available=INFO, components=["style"])
    match = config("regex_or_exact_match", id="style", gold="answer")
    (problem,) = problems(config("reward_filter", column="style", min=0), match, components=["style"])
    assert problem.fix == "operator #1 'style' does: move it up"


def test_ids_must_be_distinct_and_must_not_hide_columns():
    found = problems(
        config("length_filter", max=1),
        config("length_filter", max=2),
        config("ended", id="response"),
        config("ended", id="answer"),
        config("length_filter", id="pipeline", max=1),
    )
    assert [problem.path for problem in found] == [f"operators.{place}.id" for place in (1, 2, 3, 4)]
    assert "operators #0 and #1 have the same id 'length_filter'" in found[0].message
    assert "frame column" in found[1].message
    assert "info key" in found[2].message
    assert "reserved" in found[3].message


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"where": "level = 'high'"}, "does not fit the columns"),
        ({"where": "level + 1"}, "not true or false"),
        ({"where": "levle > 1"}, "reads 'levle', which nothing provides"),
        ({"where": "level >"}, "not a SQL expression"),
        ({"where": "AVG(level) > 1"}, "looks at other rows"),
    ],
)
def test_where_is_checked_against_names_and_types(fields, text):
    (problem,) = problems(config("length_filter", max=1, **fields))
    assert problem.path == "operators.0.where"
    assert text in problem.message


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (config("length_filter", column="level", max=1), "level: Int64"),
        (config("reward_filter", column="answer", min=0), "answer: String"),
        (config("reward_shape", expr="answer * 2"), "answer: String"),
        (config("sql", keep_where="level LIKE 'a'"), "level: Int64"),
        (config("sql", keep_where="level + 1"), "not true or false"),
        (config("sql", query="SELECT experience_id FROM rows WHERE nothing = 1", columns=["level"]), "nothing"),
        (config("group_reward_std", column="answer"), "answer: String"),
    ],
)
def test_an_operator_on_a_column_of_the_wrong_type_is_a_problem(made, text):
    (problem,) = problems(made)
    assert "does not fit its columns" in problem.message
    assert text in problem.message


def test_groups_are_not_dropped_by_a_shaped_reward():
    match = config("regex_or_exact_match", id="right", gold="answer")
    penalty = config("overlong_penalty", max=10, cache=5)
    (problem,) = problems(match, penalty, config("group_reward_std"))
    assert problem.path == "operators.2.column"
    assert "'overlong_penalty' shapes" in problem.message
    compile_operators([match, penalty, config("group_reward_std", column="right")], available=INFO)
    compile_operators([match, config("group_reward_std"), penalty], available=INFO)
    metric = config("overlong_penalty", max=10, cache=5, weight=0)
    compile_operators([match, metric, config("group_reward_std")], available=INFO)


def test_a_missing_extra_comes_with_its_install_line(monkeypatch):
    monkeypatch.setattr(MathVerify, "requires", (("no_such_package", "math"),))
    (problem,) = problems(config("math_verify", gold="answer"))
    assert "'no_such_package', which is not installed" in problem.message
    assert problem.fix == "pip install 'buffer-engine[math]'"


def test_every_problem_is_reported_at_once():
    found = problems(
        config("length_filter", max=1, where="levle > 1"),
        config("regex_or_exact_match", gold="anwser"),
        config("reward_filter", column="level", min=0),
        config("length_filter", max=1),
        config("reward_filter", id="again", column="answer", min=0),
    )
    assert [problem.path for problem in found] == [
        "operators.3.id", "operators.0.where", "operators.1.gold", "operators.4",
    ]  # fmt: skip


def test_fingerprints_follow_parameters_and_version_but_not_the_id(monkeypatch):
    def mark(**fields) -> str:
        return compile_operators([config("length_filter", **fields)], available={}).steps[0].fingerprint

    assert mark(max=1) == mark(max=1, id="other")
    assert mark(max=1) != mark(max=2)
    before = mark(max=1)
    from operators.filter.length_filter import LengthFilter

    monkeypatch.setattr(LengthFilter, "version", 2)
    assert mark(max=1) != before


def test_an_operator_may_not_change_the_type_of_a_column(monkeypatch):
    odd_operators.register(monkeypatch)
    (problem,) = problems(config("failing"), available={"length": pl.String()})
    assert "replaces 'length' (String) by UInt32" in problem.message


def test_compiling_loads_no_heavy_package_and_is_quick():
    code = (
        "import sys, time, polars as pl\n"
        "from operators.plan import compile_operators\n"
        "from operators.registry import OPERATORS\n"
        "start = time.process_time()\n"
        "make = lambda kind, **fields: OPERATORS.load(kind).Config(type=kind, **fields)\n"
        "compile_operators([make('math_verify', gold='answer'), make('reasoning_gym_answer'),\n"
        "    make('reward_shape', expr='reward * 2'), make('sql', keep_where='level > 1')],\n"
        "    available={'answer': pl.String(), 'level': pl.Int64()})\n"
        "assert time.process_time() - start < 0.5\n"
        "heavy = {'torch', 'math_verify', 'reasoning_gym', 'sympy', 'transformers', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
