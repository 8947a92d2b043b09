"""Workflows, played on the scripted model through the explorer's configuration."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import ValidationError

from explorers.base import Message, Task
from explorers.config import ExplorerConfig
from explorers.models.scripted import ScriptedConfig, ScriptedEngine
from explorers.opening import open_explorer
from explorers.sampler import plan_groups, select


def play(workflow: dict[str, Any], replies: Any, **info: object) -> dict[str, Any]:
    config = ExplorerConfig.model_validate(
        {"model": "m", "tasks": "t", "workflow": workflow, "group_size": 1, "sampling": {"max_tokens": 8}}
    )
    engine = ScriptedEngine(ScriptedConfig.model_validate({"replies": replies}))
    explorer = open_explorer(config, engine, seed=1)
    tasks = [Task("id", "t", "train", (Message("user", "begin"),), info)]
    groups = plan_groups(select(tasks, start=0, count=1), run_id="r", group_size=config.group_size)

    async def rows() -> list[dict[str, Any]]:
        exploring = explorer.explore(groups, run_id="r", step=0, partition="train")
        return [row async for chunk in exploring for row in chunk.rollouts.to_pylist()]

    (row,) = asyncio.run(rows())
    return row


def said(row: dict[str, Any]) -> list[str]:
    return [message["content"] for message in row["messages"]]


def test_single_turn_is_one_prompt_and_one_reply():
    assert said(play({"type": "single_turn"}, ["yes"])) == ["begin", "yes"]


def test_planned_user_turns_are_said_in_order_and_their_end_ends_the_dialogue():
    row = play({"type": "multi_turn", "max_turns": 9}, ["ok"], user_turns=["one", "two"])
    assert said(row) == ["begin", "ok", "one", "ok", "two", "ok"]
    assert row["stop_reason"] == "eos"
    assert json.loads(row["info_json"]) == {"turns": 3}
    # Three replies of "ok" and its end, in one row, because each prompt starts with the ids held.
    assert sum(row["loss_mask"]) == 9


def test_feedback_is_repeated_until_the_pattern_is_met():
    workflow = {"type": "multi_turn", "max_turns": 5, "feedback": "not {reply}, {hint} ({turn})", "until": "done"}
    row = play(workflow, {r"\(2\)": "done", "": "no"}, hint="try")
    assert said(row) == ["begin", "no", "not no, try (1)", "no", "not no, try (2)", "done"]
    assert json.loads(row["info_json"]) == {"turns": 3, "until_met": True}
    assert (row["stop_reason"], row["truncated"]) == ("eos", False)


def test_running_out_of_turns_is_its_own_stop_reason():
    row = play({"type": "multi_turn", "max_turns": 2, "feedback": "more"}, ["ok"])
    assert said(row) == ["begin", "ok", "more", "ok"]
    assert (row["stop_reason"], row["truncated"]) == ("max_turns", True)


def test_a_reply_cut_by_the_token_limit_ends_the_dialogue():
    row = play({"type": "multi_turn", "max_turns": 3, "feedback": "more"}, ["much too long"])
    assert said(row) == ["begin", "much too"]
    assert row["stop_reason"] == "length"


@pytest.mark.parametrize(
    ("info", "words"), [({"user_turns": "one"}, "should be a list of strings"), ({}, "feedback asks for 'hint'")]
)
def test_a_task_that_does_not_fit_the_workflow_is_a_failed_row(info, words):
    row = play({"type": "multi_turn", "feedback": "{hint}"}, ["ok"], **info)
    assert words in row["error"]


@pytest.mark.parametrize(
    "workflow",
    [
        {"type": "multi_turn", "until": "("},
        {"type": "multi_turn", "user_turns": None},
        {"type": "single_turn", "max_turns": 3},
        {"type": "double_turn"},
        {},
    ],
)
def test_workflows_that_cannot_work_are_configuration_errors(workflow):
    with pytest.raises(ValidationError):
        ExplorerConfig.model_validate({"model": "m", "tasks": "t", "workflow": workflow})
