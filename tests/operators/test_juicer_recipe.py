"""Recipes of Data-Juicer become lists of operators, and nothing of them is lost in silence."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from juicer_python import juicer_python
from operator_rows import CONTEXT, frame
from ruamel.yaml import YAML

from buffer_engine.errors import ConfigError
from operators.bridge.juicer_recipe import NEAR, import_recipe
from operators.bridge.juicer_table import juicer_table
from operators.guard import apply_guarded
from operators.registry import OPERATORS
from pipelines.cli.main import run_command

RECIPE = r"""
project_name: mine
dataset_path: a.jsonl
process:
  - text_length_filter: {min_len: 3, max_len: 40}
  - text_length_filter: {min_len: 3, reversed_range: true}
  - clean_email_mapper: {repl: '<$m>'}
  - clean_ip_mapper: {pattern: '\d'}
  - whitespace_normalization_mapper
  - words_num_filter: {min_num: 2, text_key: content, num_proc: 3}
  - words_num_filter: {min_nm: 2}
  - document_deduplicator: {lowercase: true}
  - image_size_filter:
  - language_id_score_filter: {lang: en}
  - words_num_filter: 3
  - {a: 1, b: 2}
"""


def recipe() -> object:
    return YAML(typ="safe", pure=True).load(RECIPE)


def test_operators_are_native_where_exact_and_data_juicers_elsewhere():
    mails = r"[A-Za-z0-9.\-+_]+@[a-z0-9.\-+_]+\.[a-z]+"
    assert list(import_recipe(recipe(), column="prompt").operators) == [
        {"type": "length_filter", "id": "text_length_filter", "unit": "char", "column": "prompt", "min": 3, "max": 40},
        {"type": "data_juicer", "id": "text_length_filter_2", "op": "text_length_filter", "column": "prompt",
         "args": {"min_len": 3, "reversed_range": True}},
        {"type": "replace_pattern", "id": "clean_email_mapper", "columns": ["prompt"],
         "rules": [{"pattern": mails, "new": "<$$m>"}]},
        {"type": "data_juicer", "id": "clean_ip_mapper", "op": "clean_ip_mapper", "column": "prompt",
         "args": {"pattern": r"\d"}},
        {"type": "data_juicer", "id": "whitespace_normalization_mapper", "op": "whitespace_normalization_mapper",
         "column": "prompt"},
        {"type": "data_juicer", "id": "words_num_filter", "op": "words_num_filter", "column": "prompt",
         "args": {"min_num": 2}},
        {"type": "data_juicer", "id": "language_id_score_filter", "op": "language_id_score_filter",
         "column": "prompt", "args": {"lang": "en"}, "effect": "filter"},
    ]  # fmt: skip


def test_every_step_is_taken_over_or_named_and_every_key_is_mentioned():
    found = import_recipe(recipe())
    assert [line.split(":")[0] for line in found.missing] == [
        "process[6] words_num_filter", "process[7] document_deduplicator", "process[8] image_size_filter",
        "process[10] words_num_filter", "process[11]",
    ]  # fmt: skip
    assert len(found.operators) + len(found.missing) == 12
    assert "did you mean 'min_num'" in found.missing[0]
    assert "near: exact_dedup" in found.missing[1]
    remarks = "\n".join(found.remarks)
    for word in ("project_name", "dataset_path", "num_proc", "'content'", "not known to run", "language_filter"):
        assert word in remarks


@pytest.mark.parametrize("args", [{"min_len": 9, "max_len": 3}, {"min_len": -1}, {"min_len": 1.5}, {"max_len": 5}])
def test_limits_that_the_native_filter_does_not_take_stay_with_data_juicer(args):
    (entry,) = import_recipe({"process": [{"text_length_filter": args}]}).operators
    assert entry["type"] == "data_juicer"
    assert entry["args"] == args


def test_what_is_near_is_there_and_not_already_exact():
    for op, hint in NEAR.items():
        assert hint.partition(" ")[0].rstrip(",") in OPERATORS.builtin, op
        assert op not in juicer_table().ops


@pytest.mark.parametrize("text", [["a"], {"process": {"a": 1}}, {"np": 4}, None])
def test_what_is_no_recipe_is_refused(text):
    with pytest.raises(ConfigError, match="list `process`"):
        import_recipe(text)


def test_the_command_writes_a_list_that_runs_and_tells_what_is_missing(tmp_path: Path, capsys):
    source, out = tmp_path / "recipe.yaml", tmp_path / "operators.yaml"
    source.write_text(RECIPE, encoding="utf-8")
    assert run_command(["import-recipe", str(source)]) == 0
    said = capsys.readouterr()
    assert run_command(["import-recipe", str(source), "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == said.out
    assert said.err.count("not taken over: ") == 5
    assert "# Not taken over:\n#   - process[6] words_num_filter" in said.out
    entries = YAML(typ="safe", pure=True).load(said.out)["operators"]
    assert entries == list(import_recipe(recipe()).operators)
    assert run_command(["import-recipe", str(source), "--out", str(out)]) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.slow
def test_an_imported_recipe_gives_what_data_juicer_gives():
    steps = [
        {"clean_email_mapper": None}, "whitespace_normalization_mapper", {"text_length_filter": {"min_len": 4}},
        {"words_num_filter": {"min_num": 2}},
    ]  # fmt: skip
    texts = [" to a@b.com\u2003now ", "a@b.com", "abcdef", "one two"]
    rows = frame({"response": texts})
    gone: dict[str, str] = {}
    for entry in import_recipe({"process": steps}).operators:
        kind = OPERATORS.load(entry["type"])
        extra = {"python": juicer_python()} if entry["type"] == "data_juicer" else {}
        operator = kind(kind.Config.model_validate(entry | extra))
        result = apply_guarded(operator, operator.contract(), rows, CONTEXT, name=entry["id"])
        operator.close()
        rows = rows.with_columns(**result.columns)
        if result.verdicts is not None:
            dropped = result.verdicts["row"].to_list()
            gone |= {rows["experience_id"][row]: entry["id"] for row in dropped}
            rows = rows.filter(~pl.int_range(pl.len()).is_in(dropped))
    assert rows.select("experience_id", "response").rows() == [("x0", "to  now"), ("x3", "one two")]
    assert gone == {"x1": "text_length_filter", "x2": "words_num_filter"}
