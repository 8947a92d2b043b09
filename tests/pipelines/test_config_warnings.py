"""What is allowed but seldom meant is warned of, once and only when a person wrote it; missing packages too."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from config_sample import write_sample
from test_config_problems import found

from buffer_engine.errors import MissingExtraError
from pipelines.incomplete import SpecificationError
from pipelines.load import load_spec, resolved_yaml
from pipelines.plan import check_file
from pipelines.runs import save_specification


@pytest.mark.parametrize(
    ("mine", "other", "said"),
    [
        ("split: {share: 0.5, part: rest}, ", "split: {share: .5, part: held_out}, ", None),
        ("", "", "no split keeps their prompts apart"),
        ("", "split: {share: .5, part: held_out}, ", "no split keeps their prompts apart"),
        ("split: {share: 0.4, part: rest}, ", "split: {share: .5, part: held_out}, ", "not the two parts of one"),
        ("split: {share: 0.5, seed: 2, part: rest}, ", "split: {share: .5, part: held_out}, ", "not the two parts"),
        ("split: {share: 0.5, part: rest}, ", "split: {share: .5, part: rest}, ", "not the two parts of one"),
    ],
)
def test_one_source_for_both_partitions_needs_the_two_parts_of_a_split(
    tmp_path: Path, mine: str, other: str, said: str | None
) -> None:
    file = write_sample(
        tmp_path, ("split: {share: 0.5, part: rest}, ", mine), ("split: {share: .5, part: held_out}, ", other)
    )

    warnings = check_file(file).warnings

    assert [(warning.path, warning.line) for warning in warnings] == ([("tasks.heldout", 9)] if said else [])
    assert all(str(said) in warning.message for warning in warnings)


def test_generators_with_other_seeds_are_still_one_source(tmp_path: Path) -> None:
    train = "{type: jsonl, split: {share: 0.5, part: rest}, path: FOLDER/tasks.jsonl, prompt: question}"
    heldout = (
        "{type: jsonl, split: {share: .5, part: held_out}, path: FOLDER/tasks.jsonl, prompt: question, partition: eval}"
    )
    generated = "{type: reasoning_gym, dataset: %s, seed: %d, partition: %s}"
    answer = ("gold: wanted", "gold: answer")

    def warned(second: str) -> list[str]:
        changes = ((train, generated % ("chain_sum", 1, "train")), (heldout, generated % (second, 2, "eval")), answer)
        return [w.path for w in check_file(write_sample(tmp_path, *changes)).warnings if "source" in w.message]

    assert warned("chain_sum") == ["tasks.heldout"]
    assert warned("leg_counting") == []


def test_periods_that_nobody_wrote_are_not_warned_of(tmp_path: Path) -> None:
    # Both defaults are 10 and the run has one step.
    defaults = (("checkpoint: {every_steps: 3}", "checkpoint: {keep: 1}"), (", every_steps: 3, solved", ", solved"))
    assert check_file(write_sample(tmp_path, ("steps: 6", "steps: 1"), *defaults)).warnings == ()

    written = check_file(write_sample(tmp_path, ("steps: 6", "steps: 1"))).warnings
    assert [(warning.path, warning.message, warning.fix) for warning in written] == [
        ("trainer.checkpoint.every_steps", "3 is more than the 1 step of the run", "write 1 or less"),
        ("loop.evaluate.every_steps", "3 is more than the 1 step of the run", "write 1 or less"),
    ]


def test_token_statistics_that_no_step_records_are_warned_of(tmp_path: Path) -> None:
    added = ("checkpoint: {every_steps: 3}", "checkpoint: {every_steps: 3}\n  token_stats: {every_steps: 7}")
    [warning] = check_file(write_sample(tmp_path, added)).warnings
    assert (warning.path, warning.message) == (
        "trainer.token_stats.every_steps",
        "7 is more than the 6 steps of the run",
    )
    with pytest.raises(SpecificationError, match=r"trainer\.token_stats\.every_steps"):
        check_file(write_sample(tmp_path, (added[0], added[1].replace("7", "0"))))


def test_the_specification_saved_with_a_run_brings_no_warnings_about_its_defaults(tmp_path: Path) -> None:
    defaults = (("checkpoint: {every_steps: 3}", "checkpoint: {keep: 1}"), (", every_steps: 3, solved", ", solved"))
    loaded = load_spec(write_sample(tmp_path, ("steps: 6", "steps: 1"), *defaults))

    saved = save_specification(tmp_path / "store", "tiny", resolved_yaml(loaded.spec), loaded.config_hash)

    assert "every_steps: 10" in saved.read_text()
    assert check_file(saved).warnings == ()


def test_warnings_do_not_stop_a_plan(tmp_path: Path) -> None:
    file = write_sample(
        tmp_path, ("rows: 16", "rows: 18"), ("  policy:", '  spare: {type: scripted, replies: {"": [a]}}\n  policy:')
    )

    plan = check_file(file)

    assert [(warning.path, warning.line) for warning in plan.warnings] == [
        ("models.spare", 6),
        ("explorer.tasks_per_step", 15),
        ("trainer.read.rows", 25),
    ]
    # 18 // 4 = 4 whole groups = 16 rows; the next whole number of groups is 20 rows
    assert plan.warnings[2].fix == "write 16 or 20"
    # 4 groups of 4 make 16 rows; 18 / 4 rounded up is 5 tasks
    assert plan.warnings[1].fix == "write 5 for one exploration a batch"


def test_the_trainer_may_follow_the_samplers_temperature_and_sft_need_not(tmp_path: Path) -> None:
    file = write_sample(tmp_path, ("max_tokens: 3", "temperature: 0.7"))

    assert check_file(file, overrides=("trainer.temperature=0.7",)).warnings == ()
    assert check_file(file, overrides=("trainer.algorithm.type=sft",)).warnings == ()


def test_log_probs_of_a_truncated_distribution_are_warned_of(tmp_path: Path) -> None:
    plan = check_file(write_sample(tmp_path, ("max_tokens: 3", "top_p: 0.9, top_k: 40")))

    assert [(warning.path, warning.line) for warning in plan.warnings] == [
        ("explorer.sampling.top_p", 15),
        ("explorer.sampling.top_k", 15),
    ]
    assert "distribution that top_p truncated: grpo's ratio is biased" in plan.warnings[0].message


@pytest.fixture
def uninstalled(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a package look as if it were not installed."""

    def hide(package: str) -> None:
        real = importlib.util.find_spec

        def find(name: str, *rest: str) -> object:
            return None if name.partition(".")[0] == package else real(name, *rest)

        monkeypatch.setattr("importlib.util.find_spec", find)
        monkeypatch.setattr("pipelines.package_checks.find_spec", find)

    return hide


def test_a_package_that_only_the_run_needs_is_a_warning(tmp_path: Path, uninstalled: Callable[[str], None]) -> None:
    uninstalled("torch")

    plan = check_file(write_sample(tmp_path))

    (warning,) = [warning for warning in plan.warnings if "torch" in warning.message]
    assert (warning.path, warning.line) == ("trainer", 20)
    assert warning.fix == "pip install 'buffer-engine[torch]'"


def test_a_package_that_two_sections_need_is_warned_of_once(tmp_path: Path, uninstalled: Callable[[str], None]) -> None:
    uninstalled("torch")
    change = ('type: scripted, replies: {"": ["yes"]}', "type: transformers, path: smollm2-135m")

    warnings = check_file(write_sample(tmp_path, change)).warnings

    assert [warning.path for warning in warnings] == ["models.policy"]


def test_an_operator_without_its_package_ends_with_the_install_command(
    tmp_path: Path, uninstalled: Callable[[str], None]
) -> None:
    uninstalled("math_verify")
    change = ("type: regex_or_exact_match", "type: math_verify")
    file = write_sample(tmp_path, change)

    with pytest.raises(MissingExtraError, match=r"tiny\.yaml:17: .*'math_verify'.*pip install 'buffer-engine\[math\]'"):
        check_file(file)

    problems = found(write_sample(tmp_path, change, ("seed: 11", "sede: 11")))
    assert [problem.path for problem in problems] == ["sede", "operators.0.type"]


@pytest.mark.parametrize(("bound", "warned"), [(79, True), (80, False)])
def test_a_bound_below_what_refills_may_leave_waiting_is_warned_of(tmp_path: Path, bound: int, warned: bool) -> None:
    # an exploration and three refills of 16 rows, and less than a batch of 16 that was left over
    file = write_sample(tmp_path, ("FOLDER/store}", f"FOLDER/store, max_waiting_rows: {bound}}}"))
    warnings = check_file(file).warnings
    assert [warning.path for warning in warnings] == (["store.max_waiting_rows"] if warned else [])
    assert all("80 rows, more than 79" in warning.message for warning in warnings)
