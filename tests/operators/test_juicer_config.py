"""What is known about Data-Juicer's operators before it is started."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from operator_rows import apply, config, frame
from pydantic import ValidationError

from buffer_engine.errors import ConfigError, OperatorError
from operators.base import Contract
from operators.bridge import juicer_process
from operators.bridge.juicer_env import main, requirements
from operators.bridge.juicer_table import juicer_table
from operators.plan import compile_operators
from operators.registry import OPERATORS


def contract(**fields: object) -> Contract:
    return OPERATORS.load("data_juicer")(config("data_juicer", **fields)).contract()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"op": "words_nums_filter"}, "not known to run offline .did you mean 'words_num_filter'"),
        ({"op": "words_num_filter", "args": {"min_nm": 1}}, "has no argument 'min_nm' .did you mean 'min_num'"),
        ({"op": "expand_macro_mapper", "args": {"x": 1}}, "has no argument 'x' .it takes none"),
        ({"op": "words_num_filter", "args": {"num_proc": 1}}, "'num_proc' is about Data-Juicer's own executor"),
        ({"op": "words_num_filter", "effect": "map"}, "words_num_filter is a filter: leave `effect` out"),
        ({"op": "words_num_filter", "stats": ["x"]}, r"statistics of words_num_filter are known \(num_words\)"),
        ({"op": "words_num_filter", "rewrite": True}, "is a filter: it changes no text"),
        ({"op": "clean_ip_mapper", "weight": 1.0}, "is a map: it has no fields, stats or weight"),
        ({"op": "new_filter", "effect": "filter", "stats": ["a", "b"], "weight": 1.0}, "new_filter has 2"),
        ({"op": "specified_field_filter"}, "reads a field: name it and its column in `fields`"),
        ({"op": "general_field_filter", "fields": {"text": "prompt"}}, "the field `text` is what `column` says"),
        ({"op": "clean_ip_mapper", "rewrite": True, "column": "note"}, "prompt or response, not 'note'"),
        ({"op": "clean_ip_mapper", "args": {"repl": {1}}}, "args are plain YAML values"),
    ],
)
def test_what_does_not_fit_the_operator_is_said_without_data_juicer(fields, said):
    with pytest.raises(ValidationError, match=said):
        config("data_juicer", **fields)


def test_contracts_follow_from_the_table():
    one = contract(op="words_num_filter", id="words", column="prompt")
    assert (one.reads, one.scores, one.writes, one.drops, one.cost) == ({"prompt"}, ("words",), {}, True, "python")
    two = contract(op="new_filter", effect="filter", stats=["a", "b"], id="two", fields={"n": "token_count"})
    assert (two.reads, two.scores) == ({"response", "token_count"}, ("two_a", "two_b"))
    field = contract(op="specified_numeric_field_filter", fields={"n": "token_count"})
    assert (field.reads, field.scores) == ({"token_count"}, ())
    mapper = contract(op="clean_ip_mapper")
    assert (mapper.reads, mapper.writes, mapper.drops) == ({"response"}, {"response": pl.String()}, False)
    rewriting = contract(op="clean_ip_mapper", rewrite=True)
    assert rewriting.drops
    assert rewriting.adds
    assert rewriting.reads == {"response", "messages", "made_by", "mean_logprob"}


def test_a_wrong_interpreter_is_found_before_anything_runs():
    entry = config("data_juicer", op="clean_ip_mapper", python="/nowhere/python")
    with pytest.raises(ConfigError, match="reads the file '/nowhere/python', which is not there"):
        compile_operators([entry], available={})


def test_a_column_that_is_no_text_and_rows_without_text_need_no_process():
    with pytest.raises(OperatorError, match="works on text; 'response' is Int64"):
        apply("data_juicer", frame({"response": [1]}), op="words_num_filter")
    rows = frame({"response": [None]}, {"response": pl.String})
    result = apply("data_juicer", rows, op="words_num_filter", python="/nowhere/python")
    assert result.verdicts is not None
    assert result.verdicts.select("row", "reason").rows() == [(0, "null")]
    assert apply("data_juicer", rows, op="clean_ip_mapper").columns["response"].to_list() == [None]


def test_the_table_names_fields_that_the_operator_has():
    for name, op in juicer_table().ops.items():
        assert set(op.reads) <= {"text", "fields"}, name
        assert op.writes == (() if op.effect == "filter" else ("text",)), name
        assert op.effect == "filter" or not op.stats, name


def test_the_environment_has_what_the_table_needs_and_spares_other_folders(tmp_path):
    assert requirements()[0] == f"py-data-juicer=={juicer_table().release}"
    assert {line.partition("==")[0] for line in requirements()[1:]} == {"aiohttp", "ftfy", "opencc", "selectolax"}
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="is not empty and no environment"):
        main([str(tmp_path)])
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_the_worker_needs_nothing_of_this_project():
    text = Path(juicer_process.__file__).with_name("juicer_worker.py").read_text(encoding="utf-8")
    ours = ("operators", "buffer_engine", "explorers", "trainers", "pipelines")
    imports = [line.split()[1] for line in text.splitlines() if line.strip().startswith(("import ", "from "))]
    assert imports
    assert not [name for name in imports if name.partition(".")[0] in ours]
