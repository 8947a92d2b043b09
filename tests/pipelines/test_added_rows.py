"""Rows that operators add, in a real store: tokens as sampled, versions, groups and scores."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "operators"))
from operator_rows import config, message, rollout, rollouts, scores, tasks

from buffer_engine.errors import OperatorError
from buffer_engine.store import open_store
from explorers.models.scripted import ScriptedConfig, ScriptedEngine
from operators.plan import compile_operators
from pipelines.added_rows import added_rollouts
from pipelines.curate import Curator

U, A = message("user", "u"), message("assistant", "a")
FIRST = {
    "token_ids": [1, 2, 3], "loss_mask": [False, True, True], "logprobs": [None, -0.5, -0.25], "prompt_length": 1,
    "token_versions": [{"version": 4, "length": 2}], "model_version": 4, "messages": [U, A],
}  # fmt: skip
SECOND = {
    "token_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [False, False, False, False, True, True],
    "logprobs": [None, None, None, None, -1.0, -2.0], "prompt_length": 4, "turn_index": 1, "model_version": 4,
    "token_versions": [{"version": 4, "length": 1}, {"version": 5, "length": 1}], "messages": [U, A, U, A],
    "stop_reason": "length", "eos_sampled": False, "truncated": True,
}  # fmt: skip
OTHER = {"sample_index": 1, "token_ids": [7, 8], "loss_mask": [False, True], "logprobs": [None, -3.0],
         "prompt_length": 1, "token_versions": [{"version": 4, "length": 1}], "model_version": 4}  # fmt: skip


def curated(tmp_path: Path, *operators: Any, rows: list[dict[str, Any]], given: Any = None, passes: int = 1) -> Any:
    """The store's rollouts after curation, those of the explorer left out, and the scores by row."""
    with open_store(tmp_path / "store", durability="process") as store:
        store.append("tasks", tasks({"t0": {}}))
        store.append("rollouts", rollouts(*rows))
        if given is not None:
            store.append("scores", given)
        plan = compile_operators(list(operators), available={}, components=["env"], has_reward=True)
        curator = Curator(store, plan, run_id="run", seed=1, info_columns={})
        curator.curate_new(step=1, model_version=5)
        table = store.table("rollouts").to_pylist()
        made = [row for row in table if row["made_by"] != "explorer"]
        found = {row["experience_id"]: row for row in store.table("scores").to_pylist() if row["comment"]}
        state = {row["experience_id"]: row["status"] for row in store.rollout_state(run_id="run").to_pylist()}
    return made, found, state


def test_joined_turns_have_the_tokens_log_probs_and_versions_of_both(tmp_path):
    rows = [rollout("x0", **FIRST), rollout("x1", **SECOND), rollout("x2", **OTHER)]
    given = scores(("x0", "env", 0.25, 1.0, 1), ("x1", "env", 1.0, 1.0, 1), ("x1", "env", 0.5, 1.0, 2))
    made, carried, state = curated(tmp_path, config("regroup_turns", id="join"), rows=rows, given=given)
    joined, other = made
    assert joined["token_ids"] == [1, 2, 3, 4, 5, 6]
    assert joined["loss_mask"] == [False, True, True, False, True, True]
    assert joined["logprobs"] == [None, -0.5, -0.25, None, -1.0, -2.0]
    assert joined["token_versions"] == [{"version": 4, "length": 3}, {"version": 5, "length": 1}]
    assert (joined["model_version"], joined["prompt_length"]) == (4, 1)
    assert (joined["stop_reason"], joined["truncated"], joined["parent_id"]) == ("length", True, "x1")
    assert other["token_ids"] == [7, 8]
    assert joined["group_id"] == other["group_id"] != "g0"
    assert (joined["group_size"], other["group_size"]) == (2, 2)
    assert (joined["sample_index"], other["sample_index"]) == (0, 1)
    # the newest score of the last turn, which no operator of this pipeline writes
    score = carried[joined["experience_id"]]
    assert (score["name"], score["value"], score["weight"], score["version"]) == ("env", 0.5, 1.0, 1)
    assert score["comment"] == "carried over from x1"
    assert {state[name] for name in ("x0", "x1", "x2")} == {"rejected"}
    assert state[joined["experience_id"]] == "kept"


def test_split_turns_keep_earlier_replies_as_context(tmp_path):
    long = {
        "token_ids": [1, 2, 3, 4], "loss_mask": [False, True, False, True], "logprobs": [None, -1.0, None, -2.0],
        "prompt_length": 1, "token_versions": [{"version": 4, "length": 1}, {"version": 5, "length": 1}],
        "messages": [U, A, U, A], "group_size": 1,
    }  # fmt: skip
    made, _, _ = curated(tmp_path, config("regroup_turns", direction="split"), rows=[rollout("x0", **long)])
    first, second = made
    assert (first["token_ids"], first["loss_mask"]) == ([1, 2], [False, True])
    assert (first["token_versions"], first["model_version"]) == ([{"version": 4, "length": 1}], 4)
    assert (first["stop_reason"], first["eos_sampled"]) == ("stop", False)
    assert second["loss_mask"] == [False, False, False, True]
    assert second["logprobs"] == [None, -1.0, None, -2.0]  # still what was sampled, though only the last trains
    assert second["token_versions"] == long["token_versions"]
    assert (second["stop_reason"], second["eos_sampled"], second["prompt_length"]) == ("eos", True, 3)
    assert [row["turn_index"] for row in made] == [0, 1]


def test_pairs_are_groups_of_two_that_the_next_pass_keeps(tmp_path):
    rows = [rollout("x0", sample_index=0), rollout("x1", sample_index=1, token_ids=[1, 2, 3, 4, 9])]
    given = scores(("x0", "env", 0.0, 1.0, 1), ("x1", "env", 1.0, 1.0, 1))
    made, carried, state = curated(tmp_path, config("to_preference_pairs", id="pairs"), rows=rows, given=given)
    assert [(row["token_ids"][-1], row["sample_index"], row["group_size"]) for row in made] == [(9, 0, 2), (5, 1, 2)]
    assert len({row["group_id"] for row in made}) == 1
    assert '"pair": "chosen"' in made[0]["info_json"]
    assert [carried[row["experience_id"]]["value"] for row in made] == [1.0, 0.0]
    assert [state[row["experience_id"]] for row in made] == ["kept", "kept"]


def test_replies_that_are_context_do_not_train():
    engine = ScriptedEngine(ScriptedConfig(replies={"": ["x"]}))
    parents = rollouts(rollout("x0", messages=[U, A]))
    added = pl.DataFrame(
        {"parent_id": ["x0"] * 2, "made_by": ["cut"] * 2, "messages": [[U, A, U, A], [U, A]],
         "context_replies": [1, None]}
    )  # fmt: skip
    first, second = added_rollouts(parents, added, run_id="run", number=0, engine=engine).to_pylist()
    # user and assistant turns are START role \n text END; a reply is its text and its END: 2 tokens
    assert sum(first["loss_mask"]) == 2
    assert first["loss_mask"][-2:] == [True, True]
    assert len(first["token_ids"]) == 2 * len(second["token_ids"])
    assert sum(second["loss_mask"]) == 2
    assert first["logprobs"] is None


@pytest.mark.parametrize(
    ("spans", "complaint"),
    [
        ([("x0", 0, 9)], r"cuts \[0, 9\) out of row 'x0', which has 5 tokens"),
        ([("x0", 0, 5), ("x1", 0, 5)], "joins rows whose tokenizer_id differ"),
        ([("x0", 0, 5), ("x2", 0, 5)], "joins sampled rows with rows that nobody sampled"),
    ],
)
def test_spans_that_do_not_belong_together_are_refused(spans, complaint):
    parents = rollouts(rollout("x0"), rollout("x1", tokenizer_id="other"), rollout("x2", logprobs=None))
    named = [{"experience_id": row, "start": start, "stop": stop, "trained": True} for row, start, stop in spans]
    added = pl.DataFrame({"parent_id": ["x0"], "made_by": ["cut"], "messages": [[U, A]], "spans": [named]})
    with pytest.raises(OperatorError, match=f"operator 'cut' {complaint}"):
        added_rollouts(parents, added, run_id="run", number=0, engine=None)


def test_tool_calls_of_new_text_survive():
    call = A | {"tool_calls": '[{"id": "c"}]'}
    added = pl.DataFrame(
        {
            "parent_id": ["x0"],
            "made_by": ["mend"],
            "messages": [[U, call, message("tool", "r") | {"tool_call_id": "c"}]],
        }
    )
    (row,) = added_rollouts(rollouts(rollout("x0")), added, run_id="run", number=0, engine=None).to_pylist()
    assert row["messages"][1]["tool_calls"] == '[{"id": "c"}]'
    assert row["messages"][2]["tool_call_id"] == "c"
