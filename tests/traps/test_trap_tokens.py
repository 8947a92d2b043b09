"""Traps around tokens: text encoded again, turns glued together by text, missing log-probs that become zeros."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from store_rows import decision, rollout, table

from buffer_engine.errors import SchemaError
from buffer_engine.inspect import connect_store
from buffer_engine.store import LocalStore, open_store
from buffer_engine.store.base import ReadPolicy
from explorers.base import Chunk, GroupPlan, Message, Outcome, Sampling, Task
from explorers.local import LocalExplorer
from explorers.models.scripted import FIRST_BYTE, ScriptedConfig, ScriptedEngine
from explorers.workflows.single_turn import SingleTurn, SingleTurnConfig
from pipelines.batches import assemble_batch, build_manifest
from trainers.algorithms.base import Needs
from trainers.algorithms.sft import SFT, SFTConfig
from trainers.collate import collate

# The scripted tokenizer gives one id to a byte. "aü" is three bytes, so a reply of two tokens ends inside the ü.
A, HALF_UMLAUT = ord("a") + FIRST_BYTE, 0xC3 + FIRST_BYTE
TWO_TOKENS = Sampling.model_validate({"max_tokens": 2})


@pytest.fixture
def store(tmp_path: Path):
    with open_store(tmp_path / "s", durability="process") as opened:
        yield opened


def play(workflow: Any, replies: Any, *, sampling: Sampling = TWO_TOKENS, group_size: int = 1) -> Chunk:
    """What the real explorer makes of one task."""
    engine = ScriptedEngine(ScriptedConfig.model_validate({"type": "scripted", "replies": replies}))
    plan = GroupPlan(Task("t0", "set", "train", (Message("user", "q"),)), "g0", group_size)

    async def first() -> Chunk:
        explorer = LocalExplorer(engine, workflow, sampling=sampling, seed=1)
        async for chunk in explorer.explore([plan], run_id="run", step=1, partition="train"):
            return chunk
        raise AssertionError("nothing was played")

    return asyncio.run(first())


def keep(store: LocalStore, chunk: Chunk) -> None:
    tables = {"rollouts": chunk.rollouts, "scores": chunk.scores, "events": chunk.events}
    verdicts = [decision(row) for row in chunk.rollouts.column("experience_id").to_pylist()]
    store.append_all({name: rows for name, rows in tables.items() if rows.num_rows})
    store.append("decisions", table("decisions", verdicts))


def test_training_gets_the_sampled_ids_and_not_the_text_encoded_again(store: LocalStore) -> None:
    """Trap: the reply's text goes through the tokenizer again, and other ids are trained than were sampled.

    Half an ü reads as U+FFFD, whose UTF-8 bytes are three others.
    """
    chunk = play(SingleTurn(SingleTurnConfig()), ["aü"])
    (row,) = chunk.rollouts.to_pylist()
    assert row["messages"][-1]["content"] == "a\ufffd"
    assert list("a\ufffd".encode()) != [ord("a"), 0xC3]

    keep(store, chunk)
    reservation = store.reserve(ReadPolicy(), run_id="run", batch_id="run/1", model_version=0)
    assert reservation is not None
    manifest = build_manifest(
        store, reservation, step=1, algorithm=SFT(SFTConfig()), policy=ReadPolicy(), config_hash="c", seed=1
    )
    trained = assemble_batch(store, manifest.batch, manifest.rows).rows.to_pylist()[0]
    assert trained["token_ids"][-2:] == [A, HALF_UMLAUT]
    assert trained["loss_mask"] == [False] * row["prompt_length"] + [True, True]


class TwoTurns:
    """Asks, and asks again with the reply as text, as every chat client does."""

    async def run(self, task: Task, chat: Any) -> Outcome:
        first = await chat.chat(task.messages)
        await chat.chat((*task.messages, first.message, Message("user", "go on")))
        return Outcome()


def test_a_turn_whose_past_reads_otherwise_starts_a_row_and_sql_counts_the_break(store: LocalStore) -> None:
    """Trap: turns are merged by text, so the row holds ids that the model never produced."""
    keep(store, play(TwoTurns(), ["aü"]))
    with connect_store(store) as inspection:
        rows = inspection.rows("SELECT turn_index, token_ids FROM rollouts ORDER BY turn_index")
        breaks = inspection.rows("SELECT sum(count) AS n FROM events WHERE kind = 'prefix_break'")
    assert [row["turn_index"] for row in rows] == [0, 1]
    assert list(rows[0]["token_ids"][-2:]) == [A, HALF_UMLAUT]
    assert breaks == [{"n": 1}]


def test_turns_whose_past_reads_the_same_are_one_row_with_the_turns_between_masked(store: LocalStore) -> None:
    """Trap: the mask is "the last k tokens", so the user's second turn is trained or the first reply is not."""
    # one sampled token a turn: "a" and then no end mark, because two tokens would include it
    one = Sampling.model_validate({"max_tokens": 1})
    keep(store, play(TwoTurns(), ["a"], sampling=one))
    with connect_store(store) as inspection:
        rows = inspection.rows("SELECT token_ids, loss_mask FROM rollouts")
        breaks = inspection.rows("SELECT count(*) AS n FROM events")
    # START user\nq END START assistant\n: 1+6+1 and 1+10 ids; then a; END START user\ngo on END START assistant\n; a
    first, between = 8 + 11, 1 + (1 + 10 + 1) + 11
    assert [list(row["loss_mask"]) for row in rows] == [[False] * first + [True] + [False] * between + [True]]
    assert [token for token, on in zip(rows[0]["token_ids"], rows[0]["loss_mask"], strict=True) if on] == [A, A]
    assert breaks == [{"n": 0}]


def test_a_missing_log_prob_is_null_on_disk_and_refused_by_the_loss(store: LocalStore) -> None:
    """Trap: a log-prob that is not there becomes 0, which says that the token was certain."""
    store.append("rollouts", table("rollouts", [rollout(0, logprobs=[None, None, -0.5, None])]))
    stored = store.fetch(["x0"], columns=["logprobs"]).column("logprobs").to_pylist()
    assert stored == [[None, None, -0.5, None]]
    with connect_store(store) as inspection:
        seen = inspection.rows("SELECT logprob FROM tokens WHERE experience_id = 'x0' ORDER BY position")
    assert [row["logprob"] for row in seen] == [None, None, -0.5, None]
    rows = pa.table({
        "experience_id": ["x0"], "token_ids": pa.array([[0, 2, 3, 4]], pa.list_(pa.int32())),
        "loss_mask": pa.array([[False, False, True, True]]), "model_version": pa.array([0], pa.int64()),
        "logprobs": pa.array([[None, None, -0.5, None]], pa.list_(pa.float32())), "weight": [1.0],
        "advantages": pa.nulls(1, pa.list_(pa.float64())), "group_id": ["g0"], "kind": ["rollout"], "reward": [1.0],
    })  # fmt: skip
    with pytest.raises(SchemaError, match=r"'x0' has no finite 'logprobs' at trained token 3"):
        collate(rows, Needs(logprobs=True))


@pytest.mark.parametrize(
    ("reply", "sampling", "expected"),
    [
        ("a", {"max_tokens": 5}, ("eos", True, False, "raw")),
        ({"text": "a", "end": False}, {"max_tokens": 5}, ("length", False, True, "raw")),
        ("abc", {"max_tokens": 5, "stop": ["b"]}, ("stop", False, False, "raw")),
        ("a", {"max_tokens": 5, "temperature": 0.5}, ("eos", True, False, "temperature")),
        ("a", {"max_tokens": 5, "top_p": 0.9}, ("eos", True, False, "truncated")),
    ],
)
def test_a_row_says_how_it_ended_and_which_distribution_its_log_probs_describe(
    reply: Any, sampling: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    """Trap: "finished" is guessed from the length, and log-probs of three different distributions are mixed."""
    chunk = play(SingleTurn(SingleTurnConfig()), [reply], sampling=Sampling.model_validate(sampling))
    (row,) = chunk.rollouts.to_pylist()
    assert tuple(row[name] for name in ("stop_reason", "eos_sampled", "truncated", "logprob_kind")) == expected
    assert row["tokenizer_id"] == "scripted-bytes@1"
    assert row["template_hash"]
    said = row["sampling"]
    assert (said["temperature"], said["top_p"], said["max_tokens"]) == (
        sampling.get("temperature", 1.0), sampling.get("top_p", 1.0), 5
    )  # fmt: skip
