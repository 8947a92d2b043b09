"""Training data in the shapes of TRL's page on dataset formats, with hand-made rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from exchange_rows import make_dialogues, said
from store_rows import decisions, rollout, score, table, task

from buffer_engine.errors import ExchangeError, UsageError
from buffer_engine.exchange.export import ExportReceipt, export
from buffer_engine.exchange.relations import Extraction
from buffer_engine.exchange.shapes import Shape
from buffer_engine.store.local import LocalStore
from buffer_engine.store.opening import open_store


def shaped(store: LocalStore, folder: Path, shape: Shape) -> tuple[list[dict[str, Any]], ExportReceipt]:
    target = folder / f"{shape.name}-{len(list(folder.iterdir()))}.jsonl"
    with Extraction(store) as extraction:
        receipt = export(extraction, target, [shape], format="jsonl")
    return [json.loads(line) for line in target.read_text().splitlines()], receipt


def test_sft_rows_are_the_dialogues_of_kept_rows(tmp_path: Path) -> None:
    make_dialogues(tmp_path / "store", {0: 1.0, 1: 0.0, 2: 1.0})
    with open_store(tmp_path / "store") as store:
        store.append("decisions", decisions([1], "reject", pass_id="p2"))
        rows, _ = shaped(store, tmp_path, Shape("sft", columns=("reward",)))
        assert rows == [
            {
                "messages": [
                    {"role": "user", "content": f"question {number // 2}"},
                    {"role": "assistant", "content": f"answer {number}"},
                ],
                "reward": 1.0,
            }
            for number in (0, 2)
        ]
        rows, _ = shaped(store, tmp_path, Shape("sft", where="reward = 0"))
        assert [row["messages"][-1]["content"] for row in rows] == ["answer 1"]


def test_rows_that_failed_or_are_held_out_never_come(tmp_path: Path) -> None:
    make_dialogues(tmp_path / "store", {0: 1.0})
    told = [said("user", "held"), said("assistant", "held out")]
    with open_store(tmp_path / "store") as store:
        store.append("tasks", table("tasks", [task("h", partition="eval", messages=told[:1])]))
        more = [
            rollout(8, task_id="h", group_id="h", partition="eval", messages=told),
            rollout(9, error="timeout: 3 s", messages=told),
        ]
        store.append("rollouts", table("rollouts", more))
        rows, _ = shaped(store, tmp_path, Shape("sft", where="true"))
        assert [row["messages"][-1]["content"] for row in rows] == ["answer 0"]
        rows, _ = shaped(store, tmp_path, Shape("sft", where="true", partition="eval"))
        assert [row["messages"][-1]["content"] for row in rows] == ["held out"]


def test_the_prompt_is_that_of_the_task_even_when_it_shows_replies(tmp_path: Path) -> None:
    shown = [said("user", "1 + 1?"), said("assistant", "2"), said("user", "2 + 2?")]
    with open_store(tmp_path / "store") as store:
        store.append("tasks", table("tasks", [task("t0", messages=shown)]))
        replies = [said("assistant", "let me think"), said("user", "well?"), said("assistant", "4")]
        store.append("rollouts", table("rollouts", [rollout(0, messages=[*shown, *replies])]))
        store.append("decisions", decisions([0]))
        [row], _ = shaped(store, tmp_path, Shape("prompt_completion"))
    plain = [{"role": one["role"], "content": one["content"]} for one in [*shown, *replies]]
    assert row == {"prompt": plain[:3], "completion": plain[3:]}


def test_a_row_without_a_reply_at_its_end_is_counted(tmp_path: Path) -> None:
    make_dialogues(tmp_path / "store", {0: 1.0})
    with open_store(tmp_path / "store") as store:
        store.append("rollouts", table("rollouts", [rollout(1, messages=[said("user", "question 0")])]))
        store.append("decisions", decisions([1]))
        rows, receipt = shaped(store, tmp_path, Shape("sft"))
        assert len(rows) == receipt.rows["sft"] == 1
        assert receipt.passed_over == {"no_reply": 1}


def test_tool_calls_come_as_objects_where_there_are_any(tmp_path: Path) -> None:
    calls = json.dumps([{"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "ä"}}}])
    told = [
        said("user", "weather?"), said("assistant", "", tool_calls=calls), said("tool", "sun", tool_call_id="c1"),
        said("assistant", "sunny"),
    ]  # fmt: skip
    make_dialogues(tmp_path / "store", {0: 1.0})
    with open_store(tmp_path / "store") as store:
        store.append("rollouts", table("rollouts", [rollout(1, messages=told)]))
        store.append("decisions", decisions([1]))
        rows, _ = shaped(store, tmp_path, Shape("sft"))
        assert rows[1]["messages"][1]["tool_calls"] == [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "ä"}'}}
        ]
        assert rows[1]["messages"][2] == {"role": "tool", "content": "sun", "tool_calls": None, "tool_call_id": "c1"}
        assert rows[0]["messages"][1]["tool_calls"] is None
        broken = [said("user", "weather?"), said("assistant", "", tool_calls="look()")]
        store.append("rollouts", table("rollouts", [rollout(2, messages=broken)]))
        store.append("decisions", decisions([2]))
        with pytest.raises(ExchangeError, match=r"experience_id='x2': tool_calls is 'look\(\)'"):
            shaped(store, tmp_path, Shape("sft"))


def test_a_pair_is_the_best_and_the_worst_of_a_group(tmp_path: Path) -> None:
    # group 0: 0.25 1.0 0.0 1.0 -> x1 (first of the best) over x2; group 1: all equal; group 2: 0.5 over 0.25
    rewards = {0: 0.25, 1: 1.0, 2: 0.0, 3: 1.0, 4: 1.0, 5: 1.0, 6: 1.0, 7: 1.0, 8: 0.5, 9: 0.25, 10: None}
    make_dialogues(tmp_path / "store", rewards, group_size=4)
    carried = ("chosen_id", "rejected_id", "chosen_reward", "rejected_reward", "group_id")
    with open_store(tmp_path / "store") as store:
        rows, receipt = shaped(store, tmp_path, Shape("preference", columns=carried))
        assert rows == [
            {
                "prompt": [{"role": "user", "content": "question 0"}],
                "chosen": [{"role": "assistant", "content": "answer 1"}],
                "rejected": [{"role": "assistant", "content": "answer 2"}],
                "chosen_id": "x1", "rejected_id": "x2", "chosen_reward": 1.0, "rejected_reward": 0.0, "group_id": "g0",
            },
            {
                "prompt": [{"role": "user", "content": "question 2"}],
                "chosen": [{"role": "assistant", "content": "answer 8"}],
                "rejected": [{"role": "assistant", "content": "answer 9"}],
                "chosen_id": "x8", "rejected_id": "x9", "chosen_reward": 0.5, "rejected_reward": 0.25, "group_id": "g2",
            },
        ]  # fmt: skip
        assert receipt.passed_over == {"no_difference": 1}
        rows, receipt = shaped(store, tmp_path, Shape("preference", margin=0.5))
        assert [row["chosen"][0]["content"] for row in rows] == ["answer 1"]
        assert receipt.passed_over == {"no_difference": 2}


def test_several_pairs_of_a_group_come_by_their_distance(tmp_path: Path) -> None:
    make_dialogues(tmp_path / "store", {0: 0.25, 1: 1.0, 2: 0.0, 3: 1.0}, group_size=4)
    carried = ("chosen_id", "rejected_id")
    with open_store(tmp_path / "store") as store:
        for count, wanted in (
            (3, [("x1", "x2"), ("x3", "x2"), ("x1", "x0")]),
            (0, [("x1", "x2"), ("x3", "x2"), ("x1", "x0"), ("x3", "x0"), ("x0", "x2")]),
        ):
            rows, _ = shaped(store, tmp_path, Shape("preference", columns=carried, pairs_per_group=count))
            assert [(row["chosen_id"], row["rejected_id"]) for row in rows] == wanted


def test_pairs_that_say_the_same_or_answer_other_prompts_are_counted(tmp_path: Path) -> None:
    make_dialogues(tmp_path / "store", {0: 1.0})
    with open_store(tmp_path / "store") as store:
        other = [said("user", "another question"), said("assistant", "answer")]
        same = [said("user", "question 0"), said("assistant", "answer 0")]
        store.append(
            "rollouts",
            table("rollouts", [rollout(1, messages=same), rollout(2, messages=same), rollout(3, messages=other)]),
        )
        store.append("scores", table("scores", [score("x1", 0.0), score("x2", 1.0), score("x3", 0.0)]))
        store.append("decisions", decisions([1, 2, 3]))
        rows, receipt = shaped(store, tmp_path, Shape("preference"))
    assert rows == []
    assert receipt.passed_over == {"same_text": 1, "prompts_differ": 1}


def test_wrong_columns_say_what_there_is(tmp_path: Path) -> None:
    make_dialogues(tmp_path / "store", {0: 1.0})
    with open_store(tmp_path / "store") as store:
        for shape, said_ in (
            (Shape("sft", columns=("rewrad",)), "did you mean 'reward'"),
            (Shape("preference", columns=("chosen",)), "no column 'chosen'"),
            (Shape("prompt_completion", columns=("prompt",)), "of its own"),
        ):
            with pytest.raises(UsageError, match=said_):
                shaped(store, tmp_path, shape)


def test_the_hugging_face_library_opens_every_shape(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")
    make_dialogues(tmp_path / "store", {0: 1.0, 1: 0.0})
    with open_store(tmp_path / "store") as store, Extraction(store) as extraction:
        shapes = [Shape("sft"), Shape("prompt_completion"), Shape("preference")]
        export(extraction, tmp_path / "out", shapes, format="hf")
    for name, columns in (
        ("sft", ["messages"]),
        ("prompt_completion", ["prompt", "completion"]),
        ("preference", ["prompt", "chosen", "rejected"]),
    ):
        rows = datasets.load_dataset(str(tmp_path / "out"), name, split="train", cache_dir=str(tmp_path / "cache"))
        assert rows.column_names == columns
        assert rows[0][columns[-1]][-1] == {"role": "assistant", "content": f"answer {int(name == 'preference')}"}
