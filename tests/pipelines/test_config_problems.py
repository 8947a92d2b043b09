"""Every mistake of a file is named at once, with its line, what was there and what to write."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_sample import write_sample
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buffer_engine.errors import ConfigError, Problem
from pipelines.load import load_spec
from pipelines.plan import build_plan, check_file
from pipelines.yaml_text import parse_document

MISTAKES = """\
version: 1
name: tiny
store: {path: FOLDER/store}
models:
  policy: {type: scripted, replies: {"": ["yes"]}}
tasks:
  train: {type: jsonl, path: FOLDER/tasks.jsonl, prompt: question}
  heldout: {type: jsonl, path: FOLDER/tasks.jsonl, prompt: question, partition: eval}
explorer:
  model: polcy
  tasks: heldout
  group_size: 0
  tasks_per_stpe: 4
operators:
  - {type: lenght_filter, max: 5}
  - {type: group_reward_std, column: correct}
  - {id: correct, type: regex_or_exact_match, gold: wanted}
  - {id: correct, type: ended}
  - {type: reward_filter, column: nobody, min: 0}
trainer:
  type: torch
  model: policy
  optimizer: {learning_rate: fast}
  read:
    rows: "16"
loop:
  mode: snyc
  evaluate: {tasks: heldout, solved: corect}
"""


def found(file: Path, *overrides: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        check_file(file, overrides=overrides)
    assert caught.value.file == file
    return list(caught.value.problems)


def one(file: Path, *overrides: str) -> Problem:
    problems = found(file, *overrides)
    assert len(problems) == 1, [problem.render() for problem in problems]
    return problems[0]


def outcome(file: Path, *overrides: str) -> tuple[Problem, ...]:
    """Problems or warnings; any error but a ConfigError escapes."""
    try:
        return check_file(file, overrides=overrides).warnings
    except ConfigError as error:
        return error.problems


def test_twelve_mistakes_of_every_kind_are_named_in_one_go(tmp_path: Path) -> None:
    write_sample(tmp_path)
    file = tmp_path / "mistakes.yaml"
    file.write_text(MISTAKES.replace("FOLDER", str(tmp_path)))

    problems = found(file)

    assert [(problem.line, problem.path) for problem in problems] == [
        (10, "explorer.model"),  # a name that is not declared
        (11, "explorer.tasks"),  # evaluation tasks for training
        (12, "explorer.group_size"),  # out of range
        (13, "explorer.tasks_per_stpe"),  # unknown key
        (15, "operators.0.type"),  # misspelt component
        (16, "operators.1.column"),  # written only later
        (18, "operators.3.id"),  # the same id twice
        (19, "operators.4.column"),  # nobody writes it
        (23, "trainer.optimizer.learning_rate"),  # wrong type
        (25, "trainer.read.rows"),  # a number in quotes
        (27, "loop.mode"),  # none of the choices
        (28, "loop.evaluate.solved"),  # not a component
    ]
    rendered = [problem.render(Path("m.yaml")) for problem in problems]
    assert rendered[0] == "m.yaml:10: explorer.model: there is no model 'polcy' under `models` → did you mean 'policy'?"
    assert "partition 'eval', not 'train' → use 'train'" in rendered[1]
    assert rendered[2] == "m.yaml:12: explorer.group_size: must be greater than 0, found 0 → the default is 8"
    assert rendered[3].endswith("unknown key 'tasks_per_stpe' → did you mean 'tasks_per_step'?")
    assert rendered[4].endswith("unknown operator 'lenght_filter' → did you mean 'length_filter'?")
    assert rendered[5].endswith("which nothing before it writes → operator #2 'correct' does: move it up")
    assert "operators #2 and #3 have the same id 'correct'" in rendered[6]
    assert "reads 'nobody', which nothing provides" in rendered[7]
    assert rendered[8].endswith("expected a number, found the text 'fast' → the default is 1e-05")
    assert rendered[9].endswith("expected a whole number, found the text '16' → remove the quotes")
    assert "expected one of sync, async, found the text 'snyc' → did you mean 'sync'?" in rendered[10]
    assert rendered[11].endswith("no operator scores 'corect' → did you mean 'correct'?")


def test_a_plan_knows_its_file(tmp_path: Path) -> None:
    file = write_sample(tmp_path)
    assert build_plan(load_spec(file)).file == file


def test_loading_and_checking_name_the_same_problems(tmp_path: Path) -> None:
    write_sample(tmp_path)
    file = tmp_path / "mistakes.yaml"
    file.write_text(MISTAKES.replace("FOLDER", str(tmp_path)))

    with pytest.raises(ConfigError) as caught:
        load_spec(file)

    assert list(caught.value.problems) == found(file)


def test_the_sample_itself_has_no_problems(tmp_path: Path) -> None:
    check_file(write_sample(tmp_path))


@pytest.mark.parametrize(
    ("change", "path", "line", "said"),
    [
        (("version: 1", "version: 2"), "version", 1, "expected one of 1, found 2"),
        (("version: 1\n", ""), "version", 1, "required key 'version' is missing"),
        (("name: tiny", "name: a run"), "name", 2, "letters, digits"),
        (("seed: 11", "seed: -1"), "seed", 3, "must be at least 0, found -1"),
        (("seed: 11", "seed: true"), "seed", 3, "expected a whole number, found true"),
        (("seed: 11", "seed: null"), "seed", 3, "give a value or remove the key"),
        (("store: {path: FOLDER/store}", ""), "store", 1, "required key 'store' is missing"),
        (("store: {path: FOLDER/store}", "store: x"), "store", 4, "expected a mapping, found the text 'x'"),
        (("FOLDER/store}", "FOLDER/store, max_waiting_rows: 15}"), "store.max_waiting_rows", 4,
         "one exploration makes 16 rows, and the loop trains only after it: with a bound of 15 it would wait for "
         "itself write 16 or more"),
        (("FOLDER/store", "FOLDER/tasks.jsonl"), "store.path", 4, "is a file, not a folder"),
        (("FOLDER/store", "FOLDER/tasks.jsonl/deep"), "store.path", 4, "cannot be made in it"),
        (("type: scripted", "tpye: scripted"), "models.policy", 6, "a model needs a `type`"),
        (("type: scripted, replies: {\"\": [\"yes\"]}", "type: transformers, path: FOLDER/none"),
         "models.policy.path", 6, "there is no folder"),
        (("prompt: question}\n  heldout", "prompt: qestion}\n  heldout"), "tasks.train", 8, "qestion"),
        (("FOLDER/tasks.jsonl, prompt: question}\n  heldout", "FOLDER/none.jsonl, prompt: question}\n  heldout"),
         "tasks.train", 8, "none.jsonl"),
        (("{tasks: heldout,", "{tasks: train,"), "loop.evaluate.tasks", 28, "is of partition 'train', not 'eval'"),
        (("max_tokens: 3", "max_token: 3"), "explorer.sampling.max_token", 15, "did you mean 'max_tokens'?"),
        (("{type: group_reward_std, column: correct}", "truncated_mask"), "operators.2", 19,
         "found the text 'truncated_mask' write {type: truncated_mask} if truncated_mask is its type"),
        (("name: tiny", "name: 12"), "name", 2, "expected text, found 12 put it in quotes"),
        (("weight: 0}", "weight: yes}"), "operators.1.weight", 18, "expected a number, found the text 'yes'"),
        (("weight: 0}", "weight: .nan}"), "operators.1.weight", 18, "finite number"),
        (("gold: wanted", "gold: wnated"), "operators.0.gold", 17, "did you mean 'wanted'?"),
        (("algorithm: {type: grpo}", "algorithm: {type: gpro}"), "trainer.algorithm.type", 23, "did you mean 'grpo'?"),
        (("algorithm: {type: grpo}", "algorithm: {type: grpo, clip: [0.2, high]}"), "trainer.algorithm.clip.1", 23,
         "expected a number, found the text 'high'"),
        (("read: {rows: 16}", "read: {rows: 3}"), "trainer.read.rows", 24, "a group of 4 rows never fits a batch of 3"),
        (("read: {rows: 16}", "read: {rows: 16, min_rows: 20}"), "trainer.read.min_rows", 24, "min_rows is 20"),
        (("group_size: 4", "group_size: 1"), "explorer.group_size", 13, "grpo compares the rows of a group"),
        (("max_tokens: 3", "temperature: 0.7"), "explorer.sampling.temperature", 15,
         "sampled at temperature 0.7 and trained at 1: grpo would compare log-probs of different distributions "
         "write `trainer: {temperature: 0.7}`"),
        (("max_tokens: 3", "temperature: 0"), "explorer.sampling.temperature", 15,
         "greedy sampling has no exploration, and its log-probs are raw"),
        (("FOLDER/store}", "FOLDER/store, retain: [{trained_steps_ago: 9, reason: r}]}"), "store.retain", 4,
         "nothing says when the rules are applied write `compact: {every_steps: 10}` beside it"),
        (("FOLDER/store}", "FOLDER/store, compact: {}, retain: [{reason: r}]}"),
         "store.retain.0.rejected_older_than", 4,
         "write one of the two"),
        (("FOLDER/store}", "FOLDER/store, compact: {}, retain: [{rejected_older_than: 7y, reason: r}]}"),
         "store.retain.0.rejected_older_than", 4, "'7y' is no age"),
        (("FOLDER/store}", "FOLDER/store, compact: {every_step: 5}}"), "store.compact.every_step", 4,
         "did you mean 'every_steps'?"),
        (("steps: 6", "steps: 6\n  mode: async"), "loop.mode", 28, "not available yet"),
        (("steps: 6", "steps: 6\n  publish_every: 5\n"), "loop.publish_every", 28, "up to 4 weight versions"),
    ],
)  # fmt: skip
def test_each_mistake_is_found_where_it_is(
    tmp_path: Path, change: tuple[str, str], path: str, line: int, said: str
) -> None:
    changes = [change]
    if "publish_every" in change[1]:
        changes.append(("read: {rows: 16}", "read: {rows: 16, max_staleness: 2}"))
        changes.append(("checkpoint: {every_steps: 3}", "checkpoint: {every_steps: 5}"))

    problem = one(write_sample(tmp_path, *changes))

    assert (problem.path, problem.line) == (path, line)
    assert said in f"{problem.message} {problem.fix}"


def test_a_reward_that_no_operator_gives_is_missed_before_the_run(tmp_path: Path) -> None:
    weightless = write_sample(tmp_path, ("gold: wanted}", "gold: wanted, weight: 0}"))
    assert "every score operator ('correct', 'finished') has weight 0" in one(weightless).message

    file = write_sample(
        tmp_path,
        ("  - {id: correct, type: regex_or_exact_match, gold: wanted}\n", ""),
        ("  - {id: finished, type: ended, weight: 0}\n", ""),
        ("  - {type: group_reward_std, column: correct}\n", "  - {type: length_filter, max: 9}\n"),
        (", solved: correct", ""),
    )
    assert "no operator writes a score" in one(file).message


def test_imported_rows_cannot_feed_an_algorithm_that_needs_log_probabilities(tmp_path: Path) -> None:
    text = f"""\
version: 1
name: offline
store: {{path: {tmp_path}/store}}
models: {{policy: {{type: scripted, replies: {{"": ["yes"]}}}}}}
imports: {{talks: {{path: {tmp_path}/tasks.jsonl, model: policy}}}}
operators:
  - {{type: ended}}
trainer: {{type: torch, model: policy, algorithm: {{type: grpo}}}}
"""
    write_sample(tmp_path)
    file = tmp_path / "offline.yaml"
    file.write_text(text)
    assert "imported rows have none" in one(file).message

    file.write_text(text.replace("grpo", "sft"))
    check_file(file)


def test_columns_of_an_imported_file_can_be_read_by_operators(tmp_path: Path) -> None:
    write_sample(tmp_path)
    (tmp_path / "talks.jsonl").write_text('{"prompt": "say yes", "response": "yes", "wanted": "yes"}\n')
    text = f"""\
version: 1
name: offline
store: {{path: {tmp_path}/store}}
models: {{policy: {{type: scripted, replies: {{"": ["yes"]}}}}}}
imports: {{talks: {{path: {tmp_path}/talks.jsonl, model: policy}}}}
operators:
  - {{id: correct, type: regex_or_exact_match, gold: wanted}}
"""
    file = tmp_path / "offline.yaml"
    file.write_text(text)
    assert "wanted" in check_file(file).task_columns

    file.write_text(text.replace("gold: wanted", "gold: wnated"))
    assert "did you mean 'wanted'?" in one(file).fix

    file.write_text(text.replace("talks.jsonl", "none.jsonl").replace("gold: wanted", "gold: prompt"))
    assert one(file).path == "imports.talks.path"


def test_a_wrong_section_does_not_bring_problems_that_follow_from_it(tmp_path: Path) -> None:
    # group_size falls back to 8 while the rest is checked; a batch of 4 rows would not hold 8, but nobody wrote 8.
    file = write_sample(tmp_path, ("group_size: 4", "group_size: four"), ("rows: 16", "rows: 4"))

    assert one(file).path == "explorer.group_size"


def test_a_section_is_not_blamed_for_lacking_what_was_wrong_in_it(tmp_path: Path) -> None:
    # The sql operator wants keep_where or query; a keep_where that is not SQL is one mistake, not two.
    file = write_sample(
        tmp_path, ("  - {type: group", '  - {type: sql, keep_where: "correct = = 1"}\n  - {type: group')
    )

    assert one(file).path == "operators.2.keep_where"


def test_a_wrong_component_is_still_declared_for_those_who_name_it(tmp_path: Path) -> None:
    assert one(write_sample(tmp_path, ("type: scripted", "type: scriptde"))).path == "models.policy.type"


def test_a_column_of_an_operator_that_is_wrong_itself_is_not_missed(tmp_path: Path) -> None:
    file = write_sample(tmp_path, ("type: regex_or_exact_match", "type: regex_or_exact_macth"))

    assert one(file).path == "operators.0.type"


def test_evaluation_tasks_need_the_columns_that_operators_read(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    file = write_sample(
        tmp_path,
        ("FOLDER/tasks.jsonl, prompt: question, partition", "FOLDER/other.jsonl, prompt: question, partition"),
    )

    problem = one(file)

    assert problem.path == "loop.evaluate.tasks"
    assert "operators read 'wanted', which task set 'heldout' does not have" in problem.message


def test_the_plan_carries_compiled_operators_and_a_summary(tmp_path: Path) -> None:
    plan = build_plan(load_spec(write_sample(tmp_path)))

    assert plan.operators.ids == ("correct", "finished", "group_reward_std")
    assert "wanted" in plan.task_columns
    assert "explore → curate → train, 6 steps" in plan.summary
    assert "#0 correct (regex_or_exact_match): reads response, wanted; scores with weight 1" in plan.summary
    assert not (tmp_path / "store").exists()


_PIECES = st.sampled_from(
    ["name", "store", "models", "operators", "trainer", "loop", "explorer", "type", "path", "grpo", "torch", "jsonl",
     "1", "-1", "true", "null", "1.5", "[", "]", "{", "}", ": ", ", ", "\n", "  ", "- ", "&a ", "*a", "${env:X}", "''"]
)  # fmt: skip


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(garbage=st.one_of(st.text(max_size=40), st.lists(_PIECES, max_size=30).map("".join)), at=st.integers(0, 700))
def test_garbage_anywhere_in_a_file_gives_a_plan_or_a_config_error(tmp_path: Path, garbage: str, at: int) -> None:
    text = write_sample(tmp_path).read_text()
    file = tmp_path / "garbage.yaml"
    file.write_text((text[:at] + garbage + text[at:]).encode("utf-8", "replace").decode(), encoding="utf-8")

    assert all(problem.message for problem in outcome(file))


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_any_value_in_any_place_gives_a_plan_or_problems_with_a_place(tmp_path: Path, data: st.DataObject) -> None:
    file = write_sample(tmp_path)
    places = [path for path in parse_document(file.read_text()).lines if path and ".replies" not in path]
    place = data.draw(st.sampled_from(places))
    value = data.draw(
        st.sampled_from(["null", "x", "-1", "0", "1.5", "true", "[]", "[1, a]", "{}", "{type: x}", "'8'", "1e400"])
    )

    assert all(problem.path or problem.line for problem in outcome(file, f"{place}={value}"))
