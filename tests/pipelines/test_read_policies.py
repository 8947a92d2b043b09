"""Read policies in the pipeline: weights and token masks that reach the trainer, and what `check` says of them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from config_sample import write_sample
from rich.console import Console
from store_rows import decision, decisions, rollout, score, table
from tiny_run import manifest_rows, write_specification

from buffer_engine.errors import ConfigError, Problem, TrainingError
from buffer_engine.store import LocalStore, open_store
from buffer_engine.store.base import ReadPolicy
from pipelines.batches import assemble_batch, build_manifest, stored_manifest
from pipelines.load import load_spec
from pipelines.plan import build_plan
from pipelines.runner import resume_run, start_run
from trainers.algorithms.sft import SFT, SFTConfig


@pytest.fixture
def store(tmp_path: Path):
    with open_store(tmp_path / "s", durability="process") as opened:
        yield opened


def formed(store: LocalStore, policy: ReadPolicy, *, version: int) -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
    """The stored manifest of a batch and the trainer's rows made from it."""
    reservation = store.reserve(policy, run_id="run", batch_id="b", model_version=version)
    assert reservation is not None
    made = build_manifest(
        store, reservation, step=version + 1, algorithm=SFT(SFTConfig()), policy=policy, config_hash="c", seed=1
    )
    store.prepare_batch(reservation, step=version + 1, batch=made.batch, rows=made.rows)
    batch, rows = stored_manifest(store, "b")
    return batch.to_pylist()[0], rows.to_pylist(), assemble_batch(store, batch, rows).rows


def test_only_the_young_tokens_of_a_partly_over_age_row_train(store: LocalStore) -> None:
    """Tokens 2 and 3 are sampled by weights 1 and 4, token 5 by 4; token 4 is a tool's answer."""
    spans = [{"version": 1, "length": 1}, {"version": 4, "length": 2}]
    both = {"token_ids": [1, 2, 3, 4, 5, 6], "logprobs": [None, None, -0.5, -0.5, None, -0.5]}
    mask = [False, False, True, True, False, True]
    rows = [
        rollout(0, group_size=2, model_version=1, token_versions=spans, loss_mask=mask, **both),
        rollout(1, group_size=2, model_version=4, token_versions=[{"version": 4, "length": 3}], loss_mask=mask, **both),
    ]
    store.append_all({"rollouts": table("rollouts", rows), "decisions": decisions([0, 1])})
    policy = ReadPolicy(max_staleness=2, over_age="mask")

    batch, _, trained = formed(store, policy, version=5)

    assert trained.column("loss_mask").to_pylist() == [[False, False, False, True, False, True], mask]
    assert batch["trained_tokens"] == 5
    assert json.loads(batch["reader_json"])["over_age"] == "mask"


def test_a_row_that_an_operator_masked_trains_on_nothing_whatever_its_age(store: LocalStore) -> None:
    spans = [{"version": 1, "length": 1}, {"version": 4, "length": 1}]
    rows = [rollout(0, model_version=1, token_versions=spans), rollout(1, model_version=4)]
    rows[1]["token_versions"] = [{"version": 4, "length": 2}]
    store.append_all({"rollouts": table("rollouts", rows), "decisions": decisions([0, 1])})
    store.append("decisions", table("decisions", [decision("x1", "mask", operator="tidy", reason="truncated")]))
    _, _, trained = formed(store, ReadPolicy(max_staleness=1, over_age="mask"), version=5)
    assert trained.column("loss_mask").to_pylist() == [[False, False, False, True], [False] * 4]


def test_versions_that_do_not_cover_the_sampled_tokens_stop_the_batch(store: LocalStore) -> None:
    rows = [rollout(0, group_size=1, model_version=1)]
    rows[0]["token_versions"] = [{"version": 1, "length": 1}, {"version": 4, "length": 2}]
    store.append_all({"rollouts": table("rollouts", rows), "decisions": decisions([0])})
    with pytest.raises(TrainingError, match="'x0' has 2 sampled tokens and token versions of 3"):
        formed(store, ReadPolicy(max_staleness=1, over_age="mask"), version=5)


def test_importance_weights_are_in_the_manifest_and_reach_the_trainer(store: LocalStore) -> None:
    rows = [rollout(number, group_size=1) for number in range(2)]
    scores = table("scores", [score("x0", 3.0), score("x1", 0.0)])
    store.append_all({"rollouts": table("rollouts", rows), "scores": scores, "decisions": decisions([0, 1])})
    policy = ReadPolicy(type="prioritized", by="reward", floor=1.0, exponent=1.0, importance=1.0)

    _, stored, trained = formed(store, policy, version=0)

    # priorities 4 and 1: chances 0.8 and 0.2, weights 1/1.6 and 1/0.4, the larger scaled to 1
    assert {row["experience_id"]: row["weight"] for row in stored} == pytest.approx({"x0": 0.25, "x1": 1.0})
    assert trained.column("weight").to_pylist() == [row["weight"] for row in stored]


PRIORITIZED = (
    "trainer.read.type=prioritized", "trainer.read.by=reward", "trainer.read.max_uses=3", "trainer.read.rows=8",
    "trainer.read.max_staleness=4",
)  # fmt: skip


def test_a_run_stopped_and_resumed_draws_the_batches_of_the_run_that_was_not(tmp_path: Path, tiny_model: Path) -> None:
    console = Console(file=io.StringIO())
    whole = write_specification(tmp_path, tiny_model, steps=5, store="whole")
    one = start_run(load_spec(whole, overrides=PRIORITIZED), console).folder
    cut = load_spec(write_specification(tmp_path, tiny_model, steps=5, store="cut"), overrides=PRIORITIZED)

    class Stopped(Exception):
        pass

    def stop(*_: Any, **__: Any) -> None:
        raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        reserve, calls = LocalStore.reserve, 0

        def lost(self: LocalStore, *arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            found = reserve(self, *arguments, **named)
            return stop() if calls == 5 else found  # reserved, and gone before the manifest

        patch.setattr(LocalStore, "reserve", lost)
        with pytest.raises(Stopped):
            start_run(cut, console)
    two = resume_run(cut.spec.store.path, console).folder

    with open_store(one) as first, open_store(two) as second:
        rows = [manifest_rows(store.table("batch_rows")) for store in (first, second)]
        assert rows[0] == rows[1]
        assert len(set(first.table("batch_rows").column("weight").to_pylist())) > 1
        assert second.verify() == []


def problems(file: Path) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        build_plan(load_spec(file))
    return caught.value.problems


@pytest.mark.parametrize(
    ("read", "path", "said"),
    [
        ("type: newst", "trainer.read.type", "did you mean 'newest'?"),
        ("type: uniform, exponent: 0.7", "trainer.read.exponent",
         "`exponent` means nothing to type uniform remove it, or write type: prioritized"),
        ("type: prioritized", "trainer.read.by", "`by` is missing write by: reward, advantage"),
        ("type: prioritized, by: advantage", "trainer.read.by", "every row looks alike write `max_uses` above 1"),
        ("type: stratified, by: reward", "trainer.read.by", "write by: task or taskset"),
        ("type: mixture, expert_share: 0.25", "trainer.read.expert_share", "nothing is imported add `imports:`"),
        ("type: mixture", "trainer.read.expert_share", "needs a ratio"),
        ("over_age: mask", "trainer.read.over_age", "write max_staleness"),
        ("cooldown_steps: 3", "trainer.read.cooldown_steps", "is used once write max_uses above 1"),
    ],
)  # fmt: skip
def test_a_read_policy_that_cannot_mean_what_it_says_is_a_problem(
    tmp_path: Path, read: str, path: str, said: str
) -> None:
    found = problems(write_sample(tmp_path, ("read: {rows: 16}", f"read: {{rows: 16, {read}}}")))
    assert [(problem.path, problem.line) for problem in found] == [(path, 24)]
    assert said in f"{found[0].message} {found[0].fix}"


@pytest.mark.parametrize(
    ("read", "path", "said"),
    [
        ("type: prioritized, by: 'score:corect'", "trainer.read.by", "did you mean 'correct'?"),
        ("type: stratified, by: taskset", "trainer.read.by", "there is one part"),
        ("samples_per_insert: 1.0", "trainer.read.samples_per_insert", "a row trains at most 1 times"),
        ("max_tokens: 11", "trainer.read.max_tokens", "a group of 4 replies of 3 tokens has 12"),
    ],
)
def test_what_is_allowed_and_seldom_meant_is_a_warning(tmp_path: Path, read: str, path: str, said: str) -> None:
    plan = build_plan(load_spec(write_sample(tmp_path, ("read: {rows: 16}", f"read: {{rows: 16, {read}}}"))))
    found = [warning for warning in plan.warnings if warning.path == path]
    assert len(found) == 1
    assert said in f"{found[0].message} {found[0].fix}"
