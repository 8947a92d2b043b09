"""code_tests on answers whose share of passed tests is counted by hand."""

from __future__ import annotations

import json
import re
from typing import Any

import polars as pl
import pytest
from operator_rows import apply, config, frame
from pydantic import ValidationError

import operators.sandbox.isolation as isolation
from buffer_engine.errors import OperatorError
from explorers.tasksets.human_eval import HumanEvalConfig, HumanEvalTaskset
from operators.base import Result
from operators.score.code_tests import CodeTests, code_in
from operators.testing import check_operator

ADD = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(1, 1) == 3, 'one and one'"]


def rows(*pairs: tuple[str | None, Any]) -> pl.DataFrame:
    """Replies with the info of their tasks."""
    infos = [json.dumps(info) for _, info in pairs]
    return frame({"response": [text for text, _ in pairs], "task_info": infos}, {"response": pl.String})


def scored(result: Result) -> list[float | None]:
    return result.scores["code_tests"].to_list()


def test_the_share_of_passed_asserts_is_the_score_and_the_first_failure_the_comment():
    result = apply(
        "code_tests",
        rows(
            ("```python\ndef add(a, b):\n    return a + b\n```", {"tests": ADD}),  # the third test is wrong
            ("def add(a, b):\n    return 0", {"tests": ADD}),  # only 0 + 0 is right
            ("def add(a, b):\n    return a + b", {"tests": ADD[:2]}),
            ("def add(a, b):\n    return a + b", {"tests": "\n".join(ADD)}),  # one text is one test
            ("I do not know.", {"tests": ADD}),
        ),
    )
    assert scored(result) == [2 / 3, 1 / 3, 1.0, 0.0, 0.0]
    assert result.comments == {
        0: "test 3 of 3: AssertionError: one and one",
        1: "test 1 of 3: AssertionError",
        3: "test 1 of 1: AssertionError: one and one",
        4: "test 1 of 3: SyntaxError: invalid syntax (answer.py, line 1)",
    }
    assert not result.errors


def test_all_or_nothing_counts_only_answers_that_pass_every_test():
    right = "def add(a, b): return a + b"
    result = apply("code_tests", rows((right, {"tests": ADD}), (right, {"tests": ADD[:2]})), all_or_nothing=True)
    assert scored(result) == [0.0, 1.0]


def test_input_and_output_pairs_are_compared_without_blanks_at_line_ends():
    pairs = [{"input": "2\n", "output": "4"}, {"input": "3\n", "output": "6\n\n"}, {"input": "x", "output": "?"}]
    result = apply("code_tests", rows(("print(int(input()) * 2, ' ')", {"tests": pairs})))
    assert scored(result) == [2 / 3]
    assert result.comments[0].startswith("test 3 of 3: error: ValueError: invalid literal for int()")
    result = apply("code_tests", rows(("print(5)", {"tests": pairs[:1]})))
    assert result.comments == {0: "test 1 of 1: expected '4', got '5\\n'"}


def test_a_row_without_tests_is_not_scored_and_tests_that_cannot_be_read_are_its_error():
    result = apply(
        "code_tests",
        rows(("x = 1", {}), ("x = 1", {"tests": 3}), ("x = 1", {"tests": []}), ("x = 1", {"tests": [{"input": "1"}]}),
             (None, {"tests": ADD}), ("  \n", {"tests": ADD}), ("x = 1", {"tests": "x"}), ("x = 1", [1])),
    )  # fmt: skip
    assert scored(result) == [None, None, None, None, 0.0, 0.0, 1.0, None]
    assert [error.row for error in result.errors] == [1, 2, 3, 7]
    assert result.errors[0].message == "the tests cannot be read: 'tests' must be a text or a list that is not empty"
    assert result.comments[4] == result.comments[5] == "there is no code in the reply"


@pytest.mark.parametrize(
    ("trick", "comment"),
    [
        ("import sys\nsys.exit(0)", "SystemExit: 0"),
        ("import os\nos._exit(0)", "the answer ended the process before the test was over"),
        ("import os\ndef add(a, b): os._exit(0)", "the answer ended the process before the test was over"),
        ("import atexit, os\natexit.register(print, 'passed')\nraise KeyboardInterrupt", "KeyboardInterrupt"),
        ("while True: pass", "timeout: longer than 1 s"),
        ("import os, time\nif os.fork(): os._exit(0)\ntime.sleep(60)", "timeout: longer than 1 s"),
        ("x = 'a' * (1 << 40)", "MemoryError"),
        ("print('[true, \"\"]')\nimport os\nos.write(1, b'[true, \"\"]\\n')", "NameError: name 'add' is not defined"),
        ("open(f'/proc/{__import__(\"os\").getppid()}/fd/1', 'w')", "PermissionError: [Errno 13] Permission denied"),
        ("def add(a, b): raise ValueError('x' * 1000)", "ValueError: xxx"),
    ],
)
def test_leaving_early_hanging_and_writing_reports_do_not_pass(trick, comment):
    result = apply("code_tests", rows((trick, {"tests": ADD[:1]})), timeout_seconds=1.0, memory_mb=256)
    assert scored(result) == [0.0]
    assert result.comments[0].startswith(f"test 1 of 1: {comment}")
    assert len(result.comments[0]) < 450


def test_an_answer_that_kills_its_judge_fails_what_was_left():
    source = "import os\ndef add(a, b):\n    if a == 0: os.kill(os.getppid(), 9)\n    return a + b"
    result = apply("code_tests", rows((source, {"tests": ADD})))
    assert scored(result) == [1 / 3]
    assert result.comments[0].startswith("test 2 of 3: killed:")


def test_a_test_sees_nothing_of_the_one_before():
    source = "seen = []\ndef add(a, b):\n    seen.append(a)\n    return len(seen)"
    result = apply("code_tests", rows((source, {"tests": ["assert add(1, 2) == 1", "assert add(1, 2) == 1"]})))
    assert scored(result) == [1.0]


def test_the_code_of_a_reply_is_its_last_block_of_python():
    assert code_in("x = 1") == "x = 1"
    assert code_in("a\n```python\nx = 1\n```\nb\n```py\ny = 2\n```\n```text\nout\n```") == "y = 2\n"
    assert code_in("```\nx = 1\n```\n```bash\nls\n```") == "x = 1\n"
    assert code_in("```bash\nls\n```") == ""
    assert code_in("```python\nx = 1\n") == "x = 1\n"  # cut before its end
    assert code_in("```python\ndef f(): pass\n```\n```python\nf()\n```", "f") == "def f(): pass\n"
    assert code_in("```python\nf = abs\n```\n```python\nf()\n```", "f") == "f = abs\n"


def test_every_solution_of_human_eval_passes_whole_or_as_a_rest_and_every_bare_stub_fails():
    tasks = HumanEvalTaskset(HumanEvalConfig.model_validate({"type": "human_eval"})).load("code")[:20]
    whole = [(f"Here:\n```python\n{t.info['stub']}{t.info['canonical_solution']}```", dict(t.info)) for t in tasks]
    rest = [(str(t.info["canonical_solution"]), dict(t.info)) for t in tasks]
    bare = [("    pass\n", dict(t.info)) for t in tasks]
    result = apply("code_tests", rows(*whole, *rest, *bare), tests="test", stub="stub", entry_point="entry_point")
    assert scored(result) == [1.0] * 40 + [0.0] * 20
    assert not result.errors
    assert set(result.comments) == set(range(40, 60))


def test_what_stands_before_the_function_in_the_stub_stays():
    info = {
        "test": "def check(candidate):\n    assert candidate(4) == 2.0",
        "stub": "from math import sqrt\n\ndef root(x):\n    'The root.'\n",
        "name": "root",
    }
    answers = [("def root(x):\n    return sqrt(x)", info), ("    return sqrt(x)", info), ("root = sqrt", info)]
    result = apply("code_tests", rows(*answers), tests="test", stub="stub", entry_point="name")
    assert scored(result) == [1.0, 1.0, 1.0]


def test_a_stub_needs_the_name_of_its_function():
    with pytest.raises(ValidationError, match="stub needs entry_point"):
        config("code_tests", stub="stub")


def test_where_isolation_is_missing_the_pass_stops_and_says_what_to_do(monkeypatch):
    monkeypatch.setattr(isolation, "_bubblewrap", lambda user: None)
    isolation.find.cache_clear()
    try:
        with pytest.raises(OperatorError, match=re.escape("bwrap (bubblewrap) is not installed → pip install")):
            apply("code_tests", rows(("x = 1", {"tests": "x"})))
        allowed = apply("code_tests", rows(("x = 1", {"tests": "x"})), allow_unisolated=True)
        assert scored(allowed) == [1.0]
    finally:
        isolation.find.cache_clear()


def test_the_contract_holds_for_tests_of_every_form_in_any_order_and_split():
    info = {"tests": ADD}
    pairs = {"tests": [{"input": "1", "output": "1"}]}
    table = rows(
        ("def add(a, b): return a + b", info), ("print(input())", pairs), (None, info), ("x", {}), ("x", {"tests": 0}),
        ("raise ValueError(object())", info),
    )  # fmt: skip
    check_operator(CodeTests, CodeTests.Config(type="code_tests"), full(table))


def full(table: pl.DataFrame) -> pl.DataFrame:
    """The rows with every column that a whole pass needs."""
    from operators.testing import sample_frame

    base = sample_frame().head(table.height)
    return base.with_columns(table["response"], table["task_info"])
