"""Traps around rewards: failures that count as wrong answers, shaped rewards that feed filters, scores that vanish."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from store_rows import WHEN, decisions, manifest, model, rollout, score, table

from buffer_engine.errors import ConfigError
from buffer_engine.identity import experience_id
from buffer_engine.inspect import connect_store
from buffer_engine.store import LocalStore, open_store
from buffer_engine.store.base import ReadPolicy
from operators.base import OperatorConfig
from operators.engine import run_operators
from operators.plan import compile_operators
from operators.registry import OPERATORS
from pipelines.batches import Manifest, assemble_batch, build_manifest
from trainers.algorithms.grpo import GRPO, GRPOConfig


@pytest.fixture
def store(tmp_path: Path):
    with open_store(tmp_path / "s", durability="process") as opened:
        yield opened


def config(kind: str, **fields: Any) -> OperatorConfig:
    """The configuration of an operator, as YAML would give it."""
    return OPERATORS.load(kind).Config.model_validate({"type": kind, **fields})


def reserved_manifest(store: LocalStore, *, prepare: bool = False) -> Manifest:
    """The manifest of the run's first batch."""
    policy = ReadPolicy()
    reservation = store.reserve(policy, run_id="run", batch_id="run/1", model_version=0)
    assert reservation is not None
    made = build_manifest(
        store, reservation, step=1, algorithm=GRPO(GRPOConfig()), policy=policy, config_hash="c", seed=1
    )
    if prepare:
        store.prepare_batch(reservation, step=1, batch=made.batch, rows=made.rows)
    return made


def test_any_part_of_the_key_makes_another_row() -> None:
    """Trap: ids glued from text, where run "a1" group "2" and run "a" group "12" are the same row."""
    parts: list[tuple[Any, ...]] = [
        ("run", "task", "group", 0, 0, 0), ("ru", "ntask", "group", 0, 0, 0), ("run", "taskg", "roup", 0, 0, 0),
        ("run", "task", "group", 1, 0, 0), ("run", "task", "group", 0, 1, 0), ("run", "task", "group", 0, 0, 1),
        ("run", "task", "group", 11, 1, 0), ("run", "task", "group", 1, 11, 0),
    ]  # fmt: skip
    for one, other in itertools.combinations(parts, 2):
        assert experience_id(*one) != experience_id(*other)
    assert experience_id(*parts[0]) == experience_id(*parts[0])


def test_a_time_out_is_no_wrong_answer_in_the_baseline(store: LocalStore) -> None:
    """Trap: a failed attempt gets reward 0 and pulls the group's mean from 1/2 down to 1/3.

    Right 1, wrong 0, one time-out: the mean over the two that count is 0.5, their sample deviation √0.5.
    """
    failed = rollout(2, group_size=3, error="timeout: 5 s", group_id="g0", task_id="t0")
    rows = [rollout(0, group_size=3), rollout(1, group_size=3), failed]
    store.append("rollouts", table("rollouts", rows))
    store.append("scores", table("scores", [score("x0", 1.0), score("x1", 0.0)]))
    store.append_all({"decisions": pa.concat_tables([decisions([0, 1]), decisions([2], "reject", operator="intake")])})
    found = {row["experience_id"]: row["advantage"] for row in reserved_manifest(store).rows.to_pylist()}
    assert found == {
        "x0": pytest.approx(math.sqrt(0.5), abs=1e-5),
        "x1": pytest.approx(-math.sqrt(0.5), abs=1e-5),
    }
    with connect_store(store) as inspection:
        kept = inspection.rows("SELECT error, reward, fate FROM experiences WHERE experience_id = 'x2'")
    assert kept[0]["error"] == "timeout: 5 s"
    assert kept[0]["reward"] is None


def test_a_late_score_counts_from_now_on_and_rewrites_no_history(store: LocalStore) -> None:
    """Trap: scores are a column of the row, so a late one is refused or silently changes what a past step used."""
    store.append("rollouts", table("rollouts", [rollout(0), rollout(1)]))
    store.append("scores", table("scores", [score("x0", 1.0), score("x1", 0.0)]))
    store.append("decisions", decisions([0, 1]))
    used = reserved_manifest(store, prepare=True)
    before = assemble_batch(store, used.batch, used.rows).rows
    store.commit_batch("run/1", step=1, model=model(1))

    # a person finds the verifier wrong, after the row was trained on
    late = score("x0", 0.0, version=2, source="human", author="ann", comment="the unit is missing")
    store.append("scores", table("scores", [late]))

    with connect_store(store) as inspection:
        now = inspection.rows("SELECT reward FROM experiences WHERE experience_id = 'x0'")
        history = inspection.rows(
            "SELECT version, value, author FROM scores WHERE experience_id = 'x0' ORDER BY version"
        )
        past = inspection.rows(
            "SELECT reward, score_versions_json->>'answer' AS version FROM batch_rows WHERE experience_id = 'x0'"
        )
    assert now == [{"reward": 0.0}]
    assert history == [
        {"version": 1, "value": 1.0, "author": "answer"}, {"version": 2, "value": 0.0, "author": "ann"}
    ]  # fmt: skip
    assert past == [{"reward": 1.0, "version": "1"}]
    assert assemble_batch(store, used.batch, used.rows).rows.equals(before)


SCHEMA = {
    "experience_id": pl.String, "task_id": pl.String, "group_id": pl.String, "error": pl.String,
    "response": pl.String, "answer": pl.String, "token_count": pl.Int64, "sample_index": pl.Int32,
}  # fmt: skip


def all_wrong() -> pl.DataFrame:
    """Two wrong answers of one group, of which the second is long."""
    return pl.DataFrame(
        {
            "experience_id": ["x0", "x1"], "task_id": ["t", "t"], "group_id": ["g", "g"], "error": [None, None],
            "response": ["5", "6"], "answer": ["4", "4"], "token_count": [10, 90], "sample_index": [0, 1],
        },
        schema=SCHEMA,
    )  # fmt: skip


def test_a_length_penalty_does_not_keep_an_all_wrong_group_alive() -> None:
    """Trap: the filter looks at the shaped reward, in which two wrong answers of unequal length differ."""
    steps = [
        config("regex_or_exact_match", id="right", gold="answer"),
        config("overlong_penalty", max=100, cache=20),
        config("group_reward_std", column="right"),
    ]
    with compile_operators(steps, available={"answer": pl.String()}, has_reward=False) as plan:
        result = run_operators(plan, all_wrong(), seed=1, step=1, model_version=0, pass_id="p", run_id="run", now=WHEN)
    rewards: dict[str, float] = {}
    for row in result.scores.to_pylist():
        rewards[row["experience_id"]] = rewards.get(row["experience_id"], 0.0) + row["value"] * row["weight"]
    assert rewards == {"x0": 0.0, "x1": pytest.approx(-0.5)}  # (80 − 90) / 20
    verdicts = {row["experience_id"]: (row["verdict"], row["operator"]) for row in result.decisions.to_pylist()}
    assert verdicts == {"x0": ("reject", "group_reward_std"), "x1": ("reject", "group_reward_std")}


def test_a_filter_on_the_shaped_reward_is_refused_before_the_run() -> None:
    """Trap: the same, written by hand as `column: reward`."""
    steps = [
        config("regex_or_exact_match", id="right", gold="answer"),
        config("overlong_penalty", max=100, cache=20),
        config("group_reward_std", column="reward"),
    ]
    with pytest.raises(ConfigError, match="overlong_penalty"):
        compile_operators(steps, available={"answer": pl.String()}, has_reward=False)


def test_a_rejected_row_is_still_there_with_operator_and_reason(store: LocalStore) -> None:
    """Trap: a filter deletes, and nobody can say later what was dropped, by whom and why."""
    store.append("rollouts", table("rollouts", [rollout(0), rollout(1)]))
    verdict = decisions([0, 1], "reject", operator="length_filter", reason="too_long", detail="4 > 3")
    store.append("decisions", verdict)
    assert store.fetch(["x0", "x1"], columns=["token_ids"]).column(0).to_pylist() == [[0, 2, 3, 4], [1, 2, 3, 4]]
    with connect_store(store) as inspection:
        dropped = inspection.rows("SELECT experience_id, operator, reason, detail FROM drops ORDER BY 1")
    assert dropped == [
        {"experience_id": name, "operator": "length_filter", "reason": "too_long", "detail": "4 > 3"}
        for name in ("x0", "x1")
    ]
    assert store.reserve(ReadPolicy(), run_id="run", batch_id="b", model_version=0) is None
    # and a second thought brings the row back
    store.append("decisions", decisions([0], "release", pass_id="p2", operator="ann", reason="fine"))
    store.append("decisions", decisions([0], "keep", pass_id="p3"))
    taken = store.reserve(ReadPolicy(), run_id="run", batch_id="b", model_version=0)
    assert taken is not None
    assert taken.experience_ids == ("x0",)
    batch, rows = manifest("b", 1, taken.experience_ids)
    store.prepare_batch(taken, step=1, batch=batch, rows=rows)
    assert store.verify() == []
