"""Operators that give rows out again: pairs, joined and split turns, windows, other masks."""

from __future__ import annotations

import json
from typing import Any

import polars as pl
import pytest
from operator_rows import apply, config, frame, message, reasons
from pydantic import ValidationError

from operators.base import Result
from operators.frame import FRAME_COLUMNS, MESSAGES

U, A = message("user", "u"), message("assistant", "a")
TYPES = {
    name: FRAME_COLUMNS[name].dtype
    for name in (
        "messages",
        "token_ids",
        "loss_mask",
        "logprobs",
        "sample_index",
        "attempt",
        "turn_index",
        "group_size",
    )
} | {"total_tokens": pl.Int64()}


def rows(*found: dict[str, Any], **columns: list[Any]) -> pl.DataFrame:
    """Rows of one group of two samples; tokens, mask and messages as given."""
    plain = {
        "sample_index": 0, "attempt": 0, "turn_index": 0, "group_size": 2, "made_by": "explorer", "logprobs": [],
        "messages": [U, A], "token_ids": [], "loss_mask": [], "truncated": False,
    }  # fmt: skip
    full = [plain | one for one in found]
    made = {name: [row[name] for row in full] for name in plain}
    made["total_tokens"] = [len(row["token_ids"]) for row in full]
    return frame(made | columns, TYPES)


def news(result: Result) -> list[dict[str, Any]]:
    """The added rows without what is null."""
    assert result.added is not None
    return [{name: value for name, value in row.items() if value is not None} for row in result.added.to_dicts()]


def cut(row: int, start: int, stop: int, trained: bool = True) -> dict[str, Any]:
    return {"row": row, "start": start, "stop": stop, "trained": trained}


def test_pairs_are_best_with_worst_and_their_tokens_stay():
    table = rows(
        *({"token_ids": [1, 2, 3], "loss_mask": [False, True, True], "sample_index": n} for n in range(5)),
        reward=[0.2, 1.0, None, 0.0, 0.7],
    )
    result = apply("to_preference_pairs", table, max_pairs=None)
    # 1.0 over 0.0, then 0.7 over 0.2
    assert [(row["parent"], row["bundle"], row["sample_index"]) for row in news(result)] == [
        (1, "x1 over x3", 0), (3, "x1 over x3", 1), (4, "x4 over x0", 0), (0, "x4 over x0", 1),
    ]  # fmt: skip
    assert news(result)[0]["spans"] == [cut(1, 0, 3)]
    assert json.loads(news(result)[1]["info_json"]) == {"pair": "rejected", "value": 0.0, "margin": 1.0}
    assert reasons(result) == {0: "paired", 1: "paired", 2: "unpaired", 3: "paired", 4: "paired"}
    one = apply("to_preference_pairs", table, margin=0.6, originals="keep", max_pairs=None)
    assert [row["parent"] for row in news(one)] == [1, 3]
    assert reasons(one) == {}


def test_all_pairs_come_widest_first_and_ties_make_none():
    table = rows({}, {}, {}, sample_index=[0, 1, 2], reward=[1.0, 1.0, 0.0])
    result = apply("to_preference_pairs", table, strategy="all", max_pairs=None)
    assert [row["bundle"] for row in news(result)][::2] == ["x0 over x2", "x1 over x2"]
    assert "spans" not in news(result)[0]
    assert news(apply("to_preference_pairs", table.with_columns(reward=pl.lit(1.0)))) == []


def test_pairs_of_an_earlier_pass_are_left_as_they_are():
    table = rows({"made_by": "to_preference_pairs"}, {}, {}, sample_index=[0, 0, 1], reward=[9.0, 1.0, 0.0])
    result = apply("to_preference_pairs", table)
    assert [row["bundle"] for row in news(result)] == ["x1 over x2"] * 2
    assert 0 not in reasons(result)


FIRST = {"token_ids": [1, 2, 3], "loss_mask": [False, True, True], "messages": [U, A]}
SECOND = {
    "token_ids": [1, 2, 3, 4, 5], "loss_mask": [False, False, False, False, True], "messages": [U, A, U, A],
    "turn_index": 1,
}  # fmt: skip
BROKEN = SECOND | {"token_ids": [1, 9, 3, 4, 5], "turn_index": 2}
OTHER = {"token_ids": [7, 8], "loss_mask": [False, True], "sample_index": 1}


def test_turns_join_where_the_tokens_of_one_begin_with_those_before():
    result = apply("regroup_turns", rows(FIRST, SECOND, BROKEN, OTHER))
    assert reasons(result) == dict.fromkeys(range(4), "replaced")
    found = news(result)
    assert [row["spans"] for row in found] == [[cut(0, 0, 3), cut(1, 3, 5)], [cut(2, 0, 5)], [cut(3, 0, 2)]]
    assert [(row["sample_index"], row["turn_index"], row["group_size"]) for row in found] == [
        (0, 0, 2), (0, 1, 2), (1, 0, 2),
    ]  # fmt: skip
    assert found[0]["messages"] == [U, A, U, A]
    assert {row["bundle"] for row in found} == {"g0"}


def test_groups_without_anything_to_join_are_kept():
    result = apply("regroup_turns", rows(FIRST, BROKEN | {"turn_index": 1}, OTHER))
    assert reasons(result) == {}
    assert news(result) == []


def test_episodes_with_missing_or_doubled_turns_are_left_or_rejected():
    gap = rows(FIRST, SECOND | {"turn_index": 2}, OTHER)
    assert reasons(apply("regroup_turns", gap)) == {}
    assert reasons(apply("regroup_turns", gap, broken="reject")) == {0: "gap", 1: "gap"}
    doubled = rows(FIRST, SECOND | {"turn_index": 0})
    assert set(reasons(apply("regroup_turns", doubled, broken="reject")).values()) == {"duplicate_turn"}


def test_rows_without_tokens_join_by_their_messages():
    result = apply("regroup_turns", rows({"messages": [U, A]}, {"messages": [U, A, U, A], "turn_index": 1}))
    assert [(row["messages"], row.get("spans")) for row in news(result)] == [([U, A, U, A], None)]


LONG = {
    "token_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [False, True, True, False, True, False],
    "messages": [U, A, U, A, U],
}  # fmt: skip


def test_split_gives_one_row_a_reply_with_the_rest_as_context():
    result = apply("regroup_turns", rows(LONG, OTHER), direction="split")
    found = news(result)
    assert [row["spans"] for row in found] == [
        [cut(0, 0, 1, False), cut(0, 1, 3)],
        [cut(0, 0, 4, False), cut(0, 4, 5)],
        [cut(1, 0, 2)],
    ]
    assert [row["messages"] for row in found] == [[U, A], [U, A, U, A], [U, A]]
    assert [(row["sample_index"], row["turn_index"]) for row in found] == [(0, 0), (0, 1), (1, 0)]
    wrong = apply("regroup_turns", rows(LONG | {"messages": [U, A]}), direction="split")
    assert [error.message for error in wrong.errors] == ["2 trained replies, but 1 assistant messages"]


def test_only_the_last_replies_train_and_cut_rows_are_masked():
    table = rows(LONG, OTHER, OTHER | {"sample_index": 0})
    table = table.with_columns(group_id=pl.Series(["g0", "g0", "g1"]), truncated=pl.Series([True, False, True]))
    result = apply("token_mask_rebuild", table, last_replies=1, truncated="mask")
    assert result.verdicts is not None
    assert result.verdicts.select("row", "verdict", "reason").rows() == [
        (0, "reject", "replaced"), (1, "reject", "replaced"), (2, "mask", "truncated"),
    ]  # fmt: skip
    assert [row["spans"] for row in news(result)] == [[cut(0, 0, 4, False), cut(0, 4, 6)], [cut(1, 0, 2)]]
    assert reasons(apply("token_mask_rebuild", table, last_replies=2)) == {}
    assert reasons(apply("token_mask_rebuild", table, truncated="reject")) == {0: "truncated", 2: "truncated"}
    with pytest.raises(ValidationError, match="nothing to do"):
        config("token_mask_rebuild")


def turn(number: int) -> list[dict[str, Any]]:
    return [message("user", f"u{number}"), message("assistant", f"a{number}")]


def test_windows_overlap_and_every_reply_trains_once():
    system = message("system", "s")
    dialogue = [system, *turn(1), *turn(2), *turn(3), *turn(4), message("tool", "t")]
    table = rows({"messages": dialogue}).with_columns(logprobs=pl.lit(None, pl.List(pl.Float32)))
    result = apply("window_turns", table, max=2, unit="turn")
    assert reasons(result) == {0: "replaced"}
    found = news(result)
    assert [row["messages"] for row in found] == [
        [system, *turn(1), *turn(2)],
        [system, *turn(2), *turn(3)],
        [system, *turn(3), *turn(4), message("tool", "t")],
    ]
    assert [row["context_replies"] for row in found] == [0, 1, 1]
    assert [row["turn_index"] for row in found] == [0, 1, 2]
    assert {row["bundle"] for row in found} == {"x0"}
    assert reasons(apply("window_turns", table, max=4, unit="turn")) == {}
    # words: system 1, turns 2 each; 5 words hold the system message and two turns
    assert news(apply("window_turns", table, max=5, unit="word"))[0]["messages"][-1]["content"] == "a2"
    assert reasons(apply("window_turns", table, max=2, unit="word")) == {0: "turn_too_long"}


def test_windows_in_tokens_count_the_turns_as_they_are_stored():
    # turns end at tokens 3, 5 and 8: 3, 2 and 3 tokens
    mask = [False, True, True, False, True, False, True, True]
    dialogue = [*turn(1), *turn(2), *turn(3)]
    text = rows({"messages": dialogue, "token_ids": list(range(8)), "loss_mask": mask})
    text = text.with_columns(logprobs=pl.lit(None, pl.List(pl.Float32)))
    found = news(apply("window_turns", text, max=5, overlap=1))
    assert [row["messages"] for row in found] == [[*turn(1), *turn(2)], [*turn(2), *turn(3)]]
    sampled = rows({"messages": dialogue, "token_ids": list(range(8)), "loss_mask": mask, "logprobs": [-1.0] * 8})
    assert reasons(apply("window_turns", sampled, max=5)) == {}
    assert reasons(apply("window_turns", sampled, max=5, sampled="reject")) == {0: "too_long"}


def test_the_frame_types_of_this_module_are_those_of_frames():
    assert TYPES["messages"] == MESSAGES


def imported(*prompts: str, **columns: list[Any]) -> pl.DataFrame:
    dialogues = [[message("system", "s"), message("user", prompt), A] for prompt in prompts]
    made = {"messages": dialogues, "made_by": ["import"] * len(prompts), "mean_logprob": [None] * len(prompts)}
    return frame(made | columns, {"messages": MESSAGES, "mean_logprob": pl.Float64()})


def test_prompts_are_put_into_templates_each_once():
    table = imported("What is 12 + 7?")
    result = apply("augment_prompt", table, copies=2, templates=["{prompt} Be brief.", "Solve: {prompt}"])
    found = news(result)
    assert {row["messages"][1]["content"] for row in found} == {"What is 12 + 7? Be brief.", "Solve: What is 12 + 7?"}
    assert all(row["messages"][0] == message("system", "s") and row["messages"][2] == A for row in found)
    assert [row["bundle"] for row in found] == ["x0/0", "x0/1"]
    assert {json.loads(row["info_json"])["template"] for row in found} == {0, 1}
    assert result.verdicts is None


def test_typos_swap_inner_letters_of_long_words_only():
    table = imported("Calculate abcd and 12345 xyz", "12 + 7")
    found = news(apply("augment_prompt", table, typos=1.0, case="lower"))
    assert [row["parent"] for row in found] == [0]  # nothing to change in the second
    spoilt = found[0]["messages"][1]["content"].split()
    assert spoilt[1:] == ["acbd", "and", "12345", "xyz"]
    assert spoilt[0] != "calculate"
    assert sorted(spoilt[0]) == sorted("calculate")
    assert (spoilt[0][0], spoilt[0][-1]) == ("c", "e")
    assert news(apply("augment_prompt", table, typos=1.0, case="lower")) == found


def test_only_imported_rows_that_nobody_sampled_get_copies():
    table = imported("aaaa", "aaaa", "aaaa", made_by=["explorer", "import", "augment_prompt"],
                     mean_logprob=[None, -0.5, None])  # fmt: skip
    assert news(apply("augment_prompt", table, case="upper")) == []
    for wrong, said in (
        ({}, "nothing would change"),
        ({"templates": ["x"]}, "does not have {prompt} once"),
        ({"copies": 2, "case": "upper"}, "2 copies need as many templates"),
    ):
        with pytest.raises(ValidationError, match=said):
            config("augment_prompt", **wrong)


def test_dialogues_that_cannot_be_measured_in_tokens_are_kept():
    alone = rows({"messages": [message("system", "s")]}, {"messages": []}, {"messages": turn(1) * 9})
    alone = alone.with_columns(logprobs=pl.lit(None, pl.List(pl.Float32)))
    assert reasons(apply("window_turns", alone, max=1)) == {}
