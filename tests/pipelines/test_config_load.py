"""Loading: defaults, overrides, secrets, the resolved specification and its hash."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_sample import write_sample

from buffer_engine.errors import ConfigError
from explorers.base import Sampling
from pipelines.load import load_spec, resolved_yaml
from pipelines.plan import check_file
from pipelines.secrets import reveal, reveal_text
from pipelines.spec import EvaluateSampling


def test_a_partial_mapping_keeps_the_other_defaults(tmp_path: Path) -> None:
    spec = load_spec(write_sample(tmp_path)).spec

    assert spec.explorer is not None
    assert spec.explorer.sampling.max_tokens == 3
    assert spec.explorer.sampling.temperature == 1.0
    assert spec.loop.max_refills == 3
    assert spec.loop.mode == "sync"


def test_components_become_their_own_configurations(tmp_path: Path) -> None:
    spec = load_spec(write_sample(tmp_path)).spec

    assert type(spec.operators[0]).__name__ == "RegexOrExactMatchConfig"
    assert type(spec.trainer).__name__ == "TorchTrainerConfig"
    assert type(spec.models["policy"]).__name__ == "ScriptedConfig"


def test_the_resolved_specification_loads_again_to_the_same(tmp_path: Path) -> None:
    first = load_spec(write_sample(tmp_path))
    file = tmp_path / "resolved.yaml"
    file.write_text(resolved_yaml(first.spec))

    again = load_spec(file)

    assert again.spec == first.spec
    assert again.resolved == first.resolved
    assert again.config_hash == first.config_hash
    assert "max_refills: 3" in file.read_text()


def test_the_hash_ignores_where_the_store_lies_and_nothing_that_matters(tmp_path: Path) -> None:
    file = write_sample(tmp_path)
    plain = load_spec(file).config_hash

    assert load_spec(file, overrides=(f"store.path={tmp_path}/elsewhere",)).config_hash == plain
    assert load_spec(file, overrides=("report.tensorboard=true",)).config_hash == plain
    assert load_spec(file, overrides=("seed=12",)).config_hash != plain
    assert load_spec(file, overrides=("operators.correct.weight=2",)).config_hash != plain
    # a default written out is the same configuration
    assert load_spec(file, overrides=("loop.max_refills=3",)).config_hash == plain


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("seed=3", lambda spec: spec.seed, 3),
        ("loop.steps=9", lambda spec: spec.loop.steps, 9),
        ("operators.1.weight=0.5", lambda spec: spec.operators[1].weight, 0.5),
        ("operators.finished.weight=0.5", lambda spec: spec.operators[1].weight, 0.5),
        ("operators.group_reward_std.min_std=0.1", lambda spec: spec.operators[2].min_std, 0.1),
        ("trainer.algorithm.clip=[0.1, 0.3]", lambda spec: spec.trainer.algorithm.clip, (0.1, 0.3)),
        ("trainer.optimizer.learning_rate=3e-5", lambda spec: spec.trainer.optimizer.learning_rate, 3e-5),
        ("report.plot=out.png", lambda spec: spec.report.plot, Path("out.png")),
        ("loop.evaluate=null", lambda spec: spec.loop.evaluate, None),
    ],
)
def test_an_override_sets_one_value_by_key_position_or_id(tmp_path: Path, override: str, read, value: object) -> None:
    assert read(load_spec(write_sample(tmp_path), overrides=(override,)).spec) == value


def test_the_last_of_two_overrides_wins(tmp_path: Path) -> None:
    assert load_spec(write_sample(tmp_path), overrides=("seed=3", "seed=4")).spec.seed == 4


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("loop.stpes=3", "loop.stpes: unknown key 'stpes' (from --set loop.stpes=3) → did you mean 'steps'?"),
        ("frob.x.y=1", "unknown key 'frob' (from --set frob.x.y=1)"),
        ("loop.steps=many", "expected a whole number, found the text 'many' (from --set loop.steps=many)"),
        ("loop.steps=0", "must be greater than 0, found 0 (from --set loop.steps=0)"),
        ("operators.corect.weight=1", "--set operators.corect.weight=1: operators has no item 'corect' → did you mean"),
        ("operators.7.weight=1", "--set operators.7.weight=1: operators has 3 items"),
        ("seed.x=1", "--set seed.x=1: seed is a single value"),
        ("seed", "--set seed: not of the form path=value"),
        ("=3", "--set =3: not of the form path=value"),
        ("loop..steps=3", "--set loop..steps=3: not of the form path=value"),
        ("seed=[1", "--set seed=[1: this is not YAML"),
        ("explorer.model=polcy", "there is no model 'polcy' under `models` (from --set explorer.model=polcy)"),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_file(write_sample(tmp_path), overrides=(override,))

    assert said in str(caught.value)
    assert len(caught.value.problems) == 1


def test_overrides_of_two_operators_of_one_type_need_a_position(tmp_path: Path) -> None:
    two = "  - {type: length_filter, max: 9}\n  - {type: length_filter, max: 8}\n"
    file = write_sample(tmp_path, ("  - {type: group_reward_std", f"{two}  - {{type: group_reward_std"))

    with pytest.raises(ConfigError, match=r"2 items of operators are called 'length_filter'"):
        load_spec(file, overrides=("operators.length_filter.max=7",))


def test_a_secret_stays_a_marker_until_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_ANSWER", "s3cret-value")
    file = write_sample(tmp_path, ('["yes"]', '["${env:TINY_ANSWER}"]'))

    loaded = load_spec(file)
    plan = check_file(file)

    for text in (resolved_yaml(loaded.spec), repr(loaded), repr(plan.spec), plan.summary, str(loaded.resolved)):
        assert "s3cret-value" not in text
    assert "${env:TINY_ANSWER}" in resolved_yaml(loaded.spec)
    assert reveal(loaded.spec.models["policy"]).replies[""][0].text == "s3cret-value"  # type: ignore[attr-defined]


def test_the_hash_does_not_depend_on_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_sample(tmp_path, ('["yes"]', '["${env:TINY_ANSWER}"]'))
    monkeypatch.setenv("TINY_ANSWER", "one")
    first = load_spec(file).config_hash
    monkeypatch.setenv("TINY_ANSWER", "two")

    assert load_spec(file).config_hash == first


def test_a_variable_that_is_not_set_is_a_problem_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINY_ANSWER", raising=False)

    with pytest.raises(ConfigError) as caught:
        load_spec(write_sample(tmp_path, ('["yes"]', '["${env:TINY_ANSWER}"]')))

    (problem,) = caught.value.problems
    assert (problem.line, problem.message) == (6, "environment variable TINY_ANSWER is not set")


@pytest.mark.parametrize("marker", ["${env:}", "${env TINY}", "${ENV:TINY}", "${env:1X}", "${env:TINY"])
def test_what_only_looks_like_a_secret_is_refused(tmp_path: Path, marker: str) -> None:
    with pytest.raises(ConfigError, match="is not a secret's marker"):
        load_spec(write_sample(tmp_path, ('["yes"]', f'["{marker}"]')))


def test_a_secret_may_be_part_of_a_text() -> None:
    assert reveal_text("Bearer ${env:A}-${env:B}", {"A": "x", "B": "y"}) == "Bearer x-y"
    with pytest.raises(ConfigError, match="environment variable C is not set"):
        reveal_text("${env:C}", {"A": "x"})


def test_evaluation_draws_greedily_and_otherwise_as_the_explorer() -> None:
    exploring = Sampling.model_validate({"temperature": 0.8, "top_p": 0.9, "max_tokens": 12, "stop": ["\n"]})

    assert EvaluateSampling().over(exploring) == exploring.model_copy(update={"temperature": 0.0})
    longer = EvaluateSampling.model_validate({"max_tokens": 40, "temperature": None})
    assert longer.over(exploring) == exploring.model_copy(update={"max_tokens": 40})


def test_a_component_whose_own_check_crashes_is_a_problem_at_its_place(tmp_path: Path) -> None:

    with pytest.raises(ConfigError) as caught:
        load_spec(write_sample(tmp_path, ('replies: {"": ["yes"]}', 'replies: {"": null}')))

    assert caught.value.problems[0].path.startswith("models.policy")
