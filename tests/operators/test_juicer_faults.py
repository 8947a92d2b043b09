"""What goes wrong with an operator of Data-Juicer, in the real package: it costs its row, or stops with a remedy."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from juicer_python import juicer_python
from operator_rows import CONTEXT, apply, config, frame, message

from buffer_engine.errors import MissingExtraError, OperatorError
from operators.base import Result
from operators.frame import MESSAGES
from operators.registry import OPERATORS

FUNCTIONS = str(Path(__file__).with_name("juicer_functions.py"))


def mapped(function: str, *texts: str | None, **fields: Any) -> Result:
    """What one of the misbehaving functions makes of the texts."""
    rows = frame({"response": texts}, {"response": pl.String})
    args = {"file_path": FUNCTIONS, "function_name": function}
    given = {"op": "python_file_mapper", "effect": "map", "args": args} | fields
    if "python" not in given:
        given["python"] = juicer_python()
    return apply("data_juicer", rows, **given)


def errors(result: Result) -> dict[int, str]:
    return {error.row: error.message for error in result.errors}


def test_a_row_on_which_the_operator_raises_costs_itself():
    result = mapped("raises", "a", "bad", "b", None)
    assert errors(result) == {1: "ValueError: this row is bad"}
    assert result.columns["response"].to_list() == ["A", "bad", "B", None]


def test_a_row_on_which_the_operator_hangs_costs_its_time_and_itself():
    start = time.monotonic()
    result = mapped("hangs", "a", "bad", "b", timeout_seconds=1.5)
    assert time.monotonic() - start < 60
    assert errors(result) == {1: "timeout: python_file_mapper took longer than 1.5 s"}
    assert result.columns["response"].to_list() == ["A", "bad", "B"]


def test_a_row_on_which_the_process_ends_costs_itself():
    result = mapped("ends", "a", "bad", "b")
    assert errors(result) == {1: "the process of python_file_mapper ended without an answer"}
    assert result.columns["response"].to_list() == ["A", "bad", "B"]


def test_an_operator_that_is_lost_too_often_stops_the_pass():
    with pytest.raises(OperatorError, match="2 calls of this pass were lost, the last ones end their process"):
        mapped("ends", "a", "bad", most_lost=1)


def test_a_process_killed_in_the_middle_of_a_batch_costs_no_row(tmp_path):
    python = juicer_python()
    killed: list[int] = []

    def kill() -> None:
        note = tmp_path / "pid"
        deadline = time.monotonic() + 60
        while not note.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        killed.append(int(note.read_text()))
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    result = mapped("waits", str(tmp_path), f"{tmp_path}/.", python=python)
    thread.join()
    assert killed
    assert errors(result) == {}
    assert result.columns["response"].to_list() == ["done", "done"]


def test_an_answer_that_is_no_text_or_not_one_row_is_an_error_of_its_row():
    assert errors(mapped("numbers", "a")) == {0: "ValueError: it made 7 of a text"}
    result = mapped("", "abcdef", "ab", op="text_chunk_mapper", args={"max_len": 3})
    assert errors(result) == {0: "ValueError: it made 2 rows of 1; only operators that keep rows can be used"}
    assert result.columns["response"].to_list() == ["abcdef", "ab"]


def test_an_operator_that_fetches_is_refused_even_when_it_swallows_the_refusal():
    with pytest.raises(OperatorError, match=r"wanted to fetch from 192\.0\.2\.1, and the network is off for it"):
        mapped("connects", "a")
    with pytest.raises(OperatorError, match=r"stopwords_filter of Data-Juicer\) wanted to fetch from .*network: true"):
        mapped("", "some text", op="stopwords_filter", effect="filter", args={})


def test_an_operator_that_installs_is_refused_with_the_line_to_type():
    python = juicer_python()
    with pytest.raises(OperatorError, match=r"wanted to run '.*-m pip --version', which installs or fetches"):
        mapped("installs", "a", network=True)
    with pytest.raises(MissingExtraError) as caught:
        mapped("", "some text", op="language_id_score_filter", effect="filter", args={})
    assert str(caught.value).endswith(f"{python} -m pip install 'fasttext-predict'")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"op": "text_chunk_mappr"}, "has no such operator; did you mean 'text_chunk_mapper'"),
        ({"op": "zzz"}, r"has no such operator; none of its \d+ names is like that"),
        ({"op": "text_chunk_mapper", "args": {"max_ln": 3}}, "has no argument 'max_ln'; did you mean 'max_len'"),
        ({"op": "suffix_filter"}, "is a filter, not a map"),
        ({"op": "document_deduplicator"}, "is a Deduplicator, which needs the whole data set"),
        ({"op": "python_file_mapper", "args": {"file_path": "gone.py"}}, "cannot be made with .*FileNotFoundError"),
        ({"op": "text_chunk_mapper", "release": "9.9.9"}, r"is for release 9\.9\.9, .* has 1\.6\.1"),
    ],
)
def test_what_cannot_be_run_is_said_before_any_row(fields, said):
    with pytest.raises(OperatorError, match=said):
        mapped("", "some text", **{"args": {}, **fields})


def test_without_data_juicer_the_line_to_install_it_is_said(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    bare = tmp_path / "bare" / "bin" / "python"
    with pytest.raises(MissingExtraError) as caught:
        mapped("raises", "a", python=bare)
    assert str(caught.value).endswith(f": {bare} -m pip install 'py-data-juicer==1.6.1' aiohttp")
    if importlib.util.find_spec("data_juicer") is None:
        with pytest.raises(MissingExtraError, match=r"pip install 'buffer-engine\[juicer\]'"):
            mapped("raises", "a", python=None)


def test_an_interpreter_that_does_not_start_is_named(tmp_path):
    empty = tmp_path / "bin" / "python"
    empty.parent.mkdir()
    empty.write_text("#!/bin/sh\nexit 3\n")
    empty.chmod(0o755)
    with pytest.raises(OperatorError, match="ended with code 3 at its start: it said nothing"):
        mapped("raises", "a", python=empty)
    with pytest.raises(OperatorError, match="does not start: No such file or directory"):
        mapped("raises", "a", python=tmp_path / "none")


def test_processes_and_folders_are_gone_after_close():
    operator = OPERATORS.load("data_juicer")(config("data_juicer", op="expand_macro_mapper", python=juicer_python()))
    rows = frame({"response": ["a"]})
    operator.apply(rows, CONTEXT)
    process = operator._calls._made_in
    folder = process._folder
    assert folder.is_dir()
    operator.close()
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    assert operator.apply(rows, CONTEXT).columns["response"].to_list() == ["a"]
    operator.close()


def test_an_operator_that_nobody_closes_leaves_nothing_behind_when_the_program_ends(tmp_path):
    python = str(juicer_python())
    program = f"""
import polars as pl
from operator_rows import CONTEXT, config, frame
from operators.registry import OPERATORS
operator = OPERATORS.load("data_juicer")(config("data_juicer", op="expand_macro_mapper", python={python!r}))
operator.apply(frame({{"response": ["a"]}}), CONTEXT)
print(operator._calls._made_in.pid)
"""
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_operators_share_a_process_and_go_on_when_one_of_them_loses_it():
    def made(function: str) -> Any:
        args = {"file_path": FUNCTIONS, "function_name": function}
        fields = {"op": "python_file_mapper", "effect": "map", "args": args, "python": juicer_python()}
        return OPERATORS.load("data_juicer")(config("data_juicer", **fields))

    one, two = made("raises"), made("ends")
    good, bad = frame({"response": ["a"]}), frame({"response": ["bad"]})
    try:
        assert one.apply(good, CONTEXT).columns["response"].to_list() == ["A"]
        assert two.apply(good, CONTEXT).columns["response"].to_list() == ["A"]
        first = one._calls._made_in
        assert two._calls._made_in is first
        assert errors(two.apply(bad, CONTEXT)) == {0: "the process of python_file_mapper ended without an answer"}
        assert errors(one.apply(bad, CONTEXT)) == {0: "ValueError: this row is bad"}
        assert one._calls._made_in is not first
        one.close()
        assert two.apply(good, CONTEXT).columns["response"].to_list() == ["A"]
        last = two._calls._made_in
    finally:
        one.close()
        two.close()
    with pytest.raises(ProcessLookupError):
        os.kill(last.pid, 0)


def test_rewriting_replaces_imported_rows_and_a_failing_message_is_an_error_of_its_row():
    texts = [["good", "x"], ["bad", "x"], ["bad", "x"], ["GOOD", "X"], ["bad", "X"]]
    rows = frame(
        {
            "response": [pair[1] for pair in texts],
            "messages": [[message("assistant", text) for text in pair] for pair in texts],
            "made_by": ["import", "import", "explorer", "import", "import"],
            "mean_logprob": [None, None, -0.5, None, None],
        },
        {"messages": MESSAGES, "mean_logprob": pl.Float64()},
    )
    args = {"file_path": FUNCTIONS, "function_name": "raises"}
    result = apply(
        "data_juicer", rows, op="python_file_mapper", effect="map", args=args, rewrite=True, python=juicer_python()
    )
    assert result.columns["response"].to_list() == ["X"] * 5
    assert result.verdicts is not None
    assert result.added is not None
    assert result.verdicts.select("row", "reason").rows() == [(0, "replaced")]
    assert result.added["parent"].to_list() == [0]
    assert [part["content"] for part in result.added["messages"][0]] == ["GOOD", "X"]
    assert errors(result) == {1: "ValueError: this row is bad", 4: "ValueError: this row is bad"}
