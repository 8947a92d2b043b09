"""One mistake hides no other, and what it keeps from being judged is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_sample import write_sample
from test_config_problems import found, one

from buffer_engine.errors import ConfigError
from pipelines.incomplete import SpecificationError
from pipelines.load import load_spec
from pipelines.plan import check_file


def test_a_key_written_twice_hides_no_other_mistake(tmp_path: Path) -> None:
    missing = ("FOLDER/tasks.jsonl, prompt: question}\n  heldout", "FOLDER/task.jsonl, prompt: question}\n  heldout")
    file = write_sample(
        tmp_path, ("seed: 11", "seed: 11\nname: again\nsede: 1"), missing, ("max_tokens: 3", "top_k: x")
    )

    with pytest.raises(SpecificationError) as caught:
        check_file(file)

    assert [(problem.line, problem.path) for problem in caught.value.problems] == [
        (4, "name"),
        (5, "sede"),
        (10, "tasks.train"),
        (17, "explorer.sampling.top_k"),
    ]
    assert caught.value.problems[0].message == "key 'name' is written twice: first in line 2, again in line 4"
    with pytest.raises(ConfigError) as loading:
        load_spec(file)
    assert loading.value.problems == caught.value.problems


def test_a_scalar_that_cannot_be_read_is_one_problem(tmp_path: Path) -> None:
    assert one(write_sample(tmp_path, ("seed: 11", "seed: !!int x"))).path == "seed"


@pytest.mark.parametrize(
    ("changes", "unchecked"),
    [
        # the sample's operator reads `wanted`, a column of the file that is missing
        ([("FOLDER/tasks.jsonl, prompt: question}\n  heldout", "FOLDER/none.jsonl, prompt: question}\n  heldout")],
         "columns that operators read, because tasks.train has problems"),
        ([("train: {type: jsonl", "train: {type: jsnol")],
         "columns that operators read, because tasks.train.type has problems"),
        ([("  tasks: train\n", "")], "what the algorithm needs of its rows, whether groups, batches and periods "
         "fit and columns that operators read, because explorer.tasks has problems"),
        ([("type: grpo", "type: gpro")],
         "what the algorithm needs of its rows, because trainer.algorithm.type has problems"),
        # a misspelt section is the section that was meant
        ([("explorer:\n", "explorr:\n")], "what the algorithm needs of its rows, whether groups, batches and periods "
         "fit and columns that operators read, because explorr has problems"),
        ([("seed: 11", "seed: eleven")], ""),
    ],
)  # fmt: skip
def test_what_could_not_be_judged_is_told_with_the_reason(
    tmp_path: Path, changes: list[tuple[str, str]], unchecked: str
) -> None:
    with pytest.raises(SpecificationError) as caught:
        check_file(write_sample(tmp_path, *changes))

    assert len(caught.value.problems) == 1, [problem.render() for problem in caught.value.problems]
    assert caught.value.unchecked == unchecked


def test_sources_are_looked_at_though_the_explorer_is_misspelt(tmp_path: Path) -> None:
    missing = ("FOLDER/tasks.jsonl, prompt: question}\n  heldout", "FOLDER/none.jsonl, prompt: question}\n  heldout")

    problems = found(write_sample(tmp_path, ("explorer:\n", "explorr:\n"), missing))

    assert [problem.path for problem in problems] == ["tasks.train", "explorr"]


def test_columns_are_checked_though_the_explorer_is_wrong(tmp_path: Path) -> None:
    problems = found(write_sample(tmp_path, ("  model: policy\n  tasks", "  tasks"), ("gold: wanted", "gold: wnated")))

    assert [problem.path for problem in problems] == ["explorer.model", "operators.0.gold"]


def test_a_missing_import_is_not_a_missing_column(tmp_path: Path) -> None:
    file = tmp_path / "offline.yaml"
    file.write_text(f"""\
version: 1
name: offline
store: {{path: {tmp_path}/store}}
models: {{policy: {{type: scripted, replies: {{"": ["yes"]}}}}}}
imports: {{talks: {{path: {tmp_path}/none.jsonl, model: policy}}}}
operators:
  - {{id: correct, type: regex_or_exact_match, gold: wanted}}
""")

    assert one(file).path == "imports.talks.path"
