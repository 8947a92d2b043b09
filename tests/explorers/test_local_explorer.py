"""The in-process explorer with scripted and real models: rows, failures, timeouts, retries, order, cancelling."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_engine import schema
from buffer_engine.errors import PartitionError
from explorers.base import Chunk, GroupPlan, Message, Outcome, Sampling, Task
from explorers.local import LocalExplorer, split_into_chunks
from explorers.models.scripted import ScriptedConfig, ScriptedEngine
from explorers.workflows.multi_turn import MultiTurn, MultiTurnConfig
from explorers.workflows.single_turn import SingleTurn, SingleTurnConfig

SINGLE = SingleTurn(SingleTurnConfig())


def task(name: str, **info: object) -> Task:
    return Task(f"id-{name}", "set", "train", (Message("user", name),), info)


def groups(*names: str, size: int = 2, **info: object) -> list[GroupPlan]:
    return [GroupPlan(task(name, **info), f"g-{name}", size) for name in names]


def scripted(replies: object, **options: object) -> ScriptedEngine:
    return ScriptedEngine(ScriptedConfig.model_validate({"type": "scripted", "replies": replies, **options}))


def explore(explorer: LocalExplorer, plans: Sequence[GroupPlan], **options: Any) -> list[Chunk]:
    async def collect() -> list[Chunk]:
        return [chunk async for chunk in explorer.explore(plans, run_id="r", step=1, partition="train", **options)]

    return asyncio.run(collect())


def rows(chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
    return pa.concat_tables([chunk.rollouts for chunk in chunks]).to_pylist()


def without_times(chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "created_at"} for row in rows(chunks)]


class Playing:
    """A workflow made of one function."""

    def __init__(self, play: Any) -> None:
        self.play = play

    async def run(self, task: Task, chat: Any) -> Outcome:
        return await self.play(task, chat)


def test_rows_fit_the_table_and_carry_their_key():
    chunks = explore(LocalExplorer(scripted(["yes", "no"]), SINGLE, seed=1), groups("a", "b"))
    found = rows(chunks)
    assert chunks[0].rollouts.schema == schema.ROLLOUTS.schema
    assert [(row["group_id"], row["sample_index"]) for row in found] == [
        ("g-a", 0), ("g-a", 1), ("g-b", 0), ("g-b", 1)
    ]  # fmt: skip
    assert {row["messages"][-1]["content"] for row in found} == {"yes", "no"}
    assert len({row["experience_id"] for row in found}) == 4
    for row in found:
        assert len(row["token_ids"]) == len(row["loss_mask"]) == len(row["logprobs"])
        # The scripted tokenizer: start + "user\n" + name + end is 8 ids, start + "assistant\n" is 11.
        assert row["prompt_length"] == 19
        assert sum(row["loss_mask"]) == len(row["messages"][-1]["content"]) + 1
        assert row["logprobs"][19] == pytest.approx(math.log(0.5))
    assert chunks[0].generated_tokens == sum(sum(row["loss_mask"]) for row in found)


def test_the_same_seed_plays_the_same_and_another_does_not():
    names = [f"task {number}" for number in range(12)]
    first, again, other = (
        without_times(explore(LocalExplorer(scripted(list("abcdefgh")), SINGLE, seed=seed), groups(*names)))
        for seed in (1, 1, 2)
    )
    assert first == again
    assert [row["token_ids"] for row in first] != [row["token_ids"] for row in other]


def test_chunking_changes_no_row():
    plans = groups("a", "b", "c", size=3)
    small, large = (
        without_times(explore(LocalExplorer(scripted(list("abcd")), SINGLE, seed=1, chunk_rows=size), plans))
        for size in (3, 64)
    )
    assert small == large


def test_a_resumed_exploration_repeats_exactly_the_missing_chunks():
    explorer = LocalExplorer(scripted(list("abcd")), SINGLE, seed=1, chunk_rows=4)
    plans = groups("a", "b", "c", "d", "e")
    whole, rest = explore(explorer, plans), explore(explorer, plans, start_chunk=1)
    assert [chunk.index for chunk in rest] == [1, 2]
    assert without_times(whole[1:]) == without_times(rest)


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), max_size=20), chunk_rows=st.integers(1, 12))
def test_chunks_hold_whole_groups_in_order_and_no_more_rows_than_allowed(sizes, chunk_rows):
    plans = [GroupPlan(task(str(at)), f"g{at}", size) for at, size in enumerate(sizes)]
    chunks = split_into_chunks(plans, chunk_rows)
    assert [plan for chunk in chunks for plan in chunk] == plans
    for chunk in chunks:
        assert len(chunk) == 1 or sum(plan.group_size for plan in chunk) <= chunk_rows
    for chunk, following in itertools.pairwise(chunks):
        assert sum(plan.group_size for plan in chunk) + following[0].group_size > chunk_rows


class Watched(ScriptedEngine):
    """A scripted engine that notes which texts each call was asked to continue."""

    def __init__(self, replies: object) -> None:
        super().__init__(ScriptedConfig.model_validate({"type": "scripted", "replies": replies}))
        self.calls: list[list[str]] = []

    def generate(self, requests: Any, *, cancelled: Any = None) -> Any:
        self.calls.append([self.decode(request.prompt_ids) for request in requests])
        return super().generate(requests, cancelled=cancelled)


def test_all_attempts_of_a_chunk_share_one_engine_call_per_turn_in_order_of_their_key():
    engine = Watched(["ok"])
    workflow = MultiTurn(MultiTurnConfig(max_turns=3, feedback="again"))
    explore(LocalExplorer(engine, workflow), groups("b", "a", size=4))
    assert [len(call) for call in engine.calls] == [8, 8, 8]
    assert [text[5] for text in engine.calls[0]] == list("bbbbaaaa")


def test_an_attempt_busy_elsewhere_does_not_hold_up_the_others():
    engine = Watched(["ok"])

    async def play(task: Task, chat: Any) -> Outcome:
        if task.task_id == "id-slow":
            await asyncio.sleep(0.5)
        await chat.chat(task.messages)
        return Outcome()

    started = time.monotonic()
    explore(LocalExplorer(engine, Playing(play), quiet_seconds=0.02), groups("fast", "slow", size=1))
    assert [len(call) for call in engine.calls] == [1, 1]
    assert time.monotonic() - started < 3


def test_scores_of_a_workflow_become_rows_with_their_author_and_weight():
    async def play(task: Task, chat: Any) -> Outcome:
        await chat.chat(task.messages)
        return Outcome(scores={"right": 1, "length": 0.25}, info={"moves": [1, 2]})

    explorer = LocalExplorer(scripted(["ok"]), Playing(play), author="chess", score_weights={"length": None})
    (chunk,) = explore(explorer, groups("a", size=1))
    assert chunk.scores.schema == schema.SCORES.schema
    found = {row["name"]: row for row in chunk.scores.to_pylist()}
    assert (found["right"]["value"], found["right"]["weight"], found["right"]["author"]) == (1.0, 1.0, "chess")
    assert (found["length"]["value"], found["length"]["weight"], found["length"]["source"]) == (0.25, None, "workflow")
    assert json.loads(rows([chunk])[0]["info_json"]) == {"moves": [1, 2]}


async def _raises(task: Task, chat: Any) -> Outcome:
    await chat.chat(task.messages)
    raise KeyError("board")


async def _scores_nan(task: Task, chat: Any) -> Outcome:
    await chat.chat(task.messages)
    return Outcome(scores={"right": math.nan})


async def _silent(task: Task, chat: Any) -> Outcome:
    return Outcome()


async def _own_timeout(task: Task, chat: Any) -> Outcome:
    await chat.chat(task.messages)
    raise TimeoutError("the tool's")


@pytest.mark.parametrize(
    ("play", "error", "tokens"),
    [
        (_raises, "workflow: KeyError: 'board'", 3),
        (_scores_nan, "outcome: score 'right' is nan, which is not a finite number", 3),
        (_silent, "workflow: the workflow ended without asking the model anything", 0),
        (_own_timeout, "workflow: TimeoutError: the tool's", 3),
    ],
)
def test_a_failing_workflow_is_a_row_with_its_error_and_no_scores(play, error, tokens):
    (chunk,) = explore(LocalExplorer(scripted(["ok"]), Playing(play)), groups("a", size=1))
    (row,) = rows([chunk])
    assert row["error"] == error
    assert row["stop_reason"] == "error"
    assert sum(row["loss_mask"]) == tokens
    assert chunk.scores.num_rows == 0


def test_one_failing_attempt_leaves_its_siblings_alone():
    engine = scripted({"bad": [{"error": "no luck"}], "": ["ok"]})
    found = rows(explore(LocalExplorer(engine, SINGLE), groups("bad", "good")))
    assert [row["error"] for row in found] == ["engine: no luck"] * 2 + [None] * 2


def test_an_engine_that_crashes_fails_every_attempt_of_its_call_with_the_reason():
    found = rows(
        explore(LocalExplorer(scripted({"a": [{"crash": "out of memory"}], "": ["ok"]}), SINGLE), groups("a", "b"))
    )
    assert [row["error"] for row in found] == ["engine: RuntimeError: out of memory"] * 4


def test_an_engine_that_loses_a_reply_fails_its_call_instead_of_hanging():
    class Forgetful(ScriptedEngine):
        def generate(self, requests: Any, *, cancelled: Any = None) -> Any:
            return super().generate(requests, cancelled=cancelled)[1:]

    engine = Forgetful(ScriptedConfig.model_validate({"replies": ["ok"]}))
    found = rows(explore(LocalExplorer(engine, SINGLE), groups("a")))
    assert {row["error"] for row in found} == {"engine: ValueError: 2 requests went in and 1 replies came out"}


def test_a_prompt_beyond_the_context_is_its_own_kind_and_is_not_tried_again():
    explorer = LocalExplorer(scripted(["ok"], context_length=30), SINGLE, max_retries=3)
    (chunk,) = explore(explorer, groups("x" * 40, "y", size=1))
    long, short = rows([chunk])
    assert long["error"] == "context: the prompt has 58 tokens and the context holds 30"
    assert short["error"] is None
    assert chunk.events.num_rows == 0


def test_a_late_attempt_is_a_timeout_row_that_keeps_its_finished_turns():
    async def play(task: Task, chat: Any) -> Outcome:
        await chat.chat(task.messages)
        await asyncio.sleep(30)
        return Outcome()

    (row,) = rows(explore(LocalExplorer(scripted(["ok"]), Playing(play), timeout_seconds=0.2), groups("a", size=1)))
    assert row["error"] == "timeout: not finished within 0.2 seconds"
    assert (row["stop_reason"], row["truncated"], sum(row["loss_mask"])) == ("timeout", True, 3)


def test_a_slow_engine_is_told_to_give_up_when_nobody_waits_any_more():
    engine = scripted({"slow": [{"text": "late", "delay_seconds": 30}], "": ["ok"]})
    started = time.monotonic()
    found = rows(explore(LocalExplorer(engine, SINGLE, timeout_seconds=0.3), groups("slow", size=2)))
    assert [row["error"] for row in found] == ["timeout: not finished within 0.3 seconds"] * 2
    assert time.monotonic() - started < 5


def test_a_retry_is_an_event_and_the_row_says_which_attempt_it_was():
    tries: dict[str, int] = {}

    async def play(task: Task, chat: Any) -> Outcome:
        await chat.chat(task.messages)
        tries[task.task_id] = tries.get(task.task_id, 0) + 1
        if tries[task.task_id] < 3:
            raise OSError("tool away")
        return Outcome()

    (chunk,) = explore(LocalExplorer(scripted(list("abcdefgh")), Playing(play), max_retries=2), groups("a", size=1))
    (row,) = rows([chunk])
    assert (row["attempt"], row["error"]) == (2, None)
    events = chunk.events.to_pylist()
    assert [(event["kind"], event["count"]) for event in events] == [("retry", 1)] * 2
    assert events[1]["detail"] == "task id-a, sample 0, attempt 1: workflow: OSError: tool away"


def test_retries_end_and_the_last_failure_is_the_row():
    (chunk,) = explore(LocalExplorer(scripted([{"error": "no"}]), SINGLE, max_retries=1), groups("a", size=1))
    assert [(row["attempt"], row["error"]) for row in rows([chunk])] == [(1, "engine: no")]
    assert chunk.events.num_rows == 1


def test_a_task_of_the_other_partition_is_refused_before_anything_is_played():
    engine = Watched(["ok"])
    stranger = GroupPlan(Task("t", "set", "eval", (Message("user", "q"),)), "g", 1)
    with pytest.raises(PartitionError, match="partition 'eval'"):
        explore(LocalExplorer(engine, SINGLE), [*groups("a"), stranger])
    assert engine.calls == []


def test_a_cancelled_exploration_leaves_nothing_running():
    engine = scripted({"": [{"text": "late", "delay_seconds": 30}]})

    async def cancel() -> None:
        explorer = LocalExplorer(engine, SINGLE, timeout_seconds=None)

        async def consume() -> None:
            async for _ in explorer.explore(groups("a"), run_id="r", step=1, partition="train"):
                pass

        running = asyncio.create_task(consume())
        await asyncio.sleep(0.2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert [other for other in asyncio.all_tasks() if other is not asyncio.current_task()] == []

    started = time.monotonic()
    asyncio.run(cancel())
    assert time.monotonic() - started < 5
    assert [thread for thread in threading.enumerate() if "buffer-engine" in thread.name] == []


def test_turns_of_a_real_model_merge_by_ids_and_their_logprobs_stay_exact(tiny_model: Path):
    import torch

    from explorers.models.transformers_model import TransformersConfig, TransformersEngine

    engine = TransformersEngine(TransformersConfig(path=str(tiny_model)))
    workflow = MultiTurn(MultiTurnConfig(max_turns=3, feedback="more {turn}"))
    sampling = Sampling.model_validate({"max_tokens": 6})
    chunks = explore(LocalExplorer(engine, workflow, sampling=sampling, seed=3), groups("hello", "you", size=3))
    found = rows(chunks)
    assert all(row["error"] is None for row in found)
    for row in found:
        with torch.no_grad():
            logits = engine._network(input_ids=torch.tensor([row["token_ids"]])).logits[0]
        exact = torch.log_softmax(logits, dim=-1)
        for at, (token, trains, logprob) in enumerate(
            zip(row["token_ids"], row["loss_mask"], row["logprobs"], strict=True)
        ):
            assert trains == (logprob is not None)
            if trains:
                assert logprob == pytest.approx(exact[at - 1, token].item(), abs=1e-5)
    # An undecodable reply (the unknown token) may break a prefix; each break is an extra row and an event.
    breaks = [event for event in chunks[0].events.to_pylist() if event["kind"] == "prefix_break"]
    assert len(found) == 6 + sum(event["count"] for event in breaks)


def test_a_store_takes_rows_of_every_kind_and_a_repeat_changes_nothing(tmp_path: Path):
    from buffer_engine.store.opening import open_store
    from explorers.task_rows import tasks_table

    async def play(task: Task, chat: Any) -> Outcome:
        if task.task_id == "id-early":
            raise KeyError("nothing sampled")
        first = await chat.chat(task.messages)
        if task.task_id == "id-broken":  # a reply that is told otherwise in the next prompt breaks the prefix
            await chat.chat([*task.messages, Message("assistant", first.message.content + "!"), Message("user", "so?")])
        return Outcome(scores={"right": 1.0}, info={"turns": 2})

    plans = groups("good", "broken", "early", size=2)
    explorer = LocalExplorer(scripted(["yes", "no"]), Playing(play), seed=1, max_retries=1)
    store = open_store(tmp_path / "store")
    for _ in range(2):
        (chunk,) = explore(explorer, plans)
        tables = {"rollouts": chunk.rollouts, "scores": chunk.scores}
        receipt = store.append_all({"tasks": tasks_table([plan.task for plan in plans]), **tables})
    assert store.table("rollouts").num_rows == 2 + 4 + 2
    assert store.table("scores").num_rows == 2 + 4
    assert receipt.appended.get("rollouts", 0) == 0
    assert receipt.unchanged["rollouts"] == 8
    kinds = sorted((event["kind"], event["count"]) for event in chunk.events.to_pylist())
    assert kinds == [("prefix_break", 1)] * 2 + [("retry", 1)] * 2
    store.close()
