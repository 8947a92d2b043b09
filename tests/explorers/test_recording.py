"""Token-exact recording: turns merge by ids, never by text."""

from __future__ import annotations

import math

import pytest

from buffer_engine.errors import RolloutError
from explorers.base import Generation, GroupPlan, Message, Outcome, Sampling, Task
from explorers.recorder import Attempt, Failure, Recording, check_outcome, rollout_rows

SAMPLING = Sampling.model_validate({"max_tokens": 4})
ATTEMPT = Attempt(
    run_id="r",
    step=3,
    plan=GroupPlan(Task("t", "set", "train", (Message("user", "q"),)), "g", 2),
    sample=1,
    attempt=0,
    tokenizer_id="tok",
    template_hash="tem",
)


def turn(recording: Recording, prompt: list[int], reply: list[int], *, version: int = 0, **options: object) -> None:
    kind = options.pop("kind", "raw")
    reason = options.pop("reason", "eos")
    recording.record(
        messages=[Message("user", "q")],
        prompt_ids=prompt,
        generation=Generation(
            tuple(reply),
            tuple(-0.1 * t for t in reply),
            reason,
            reason == "eos",
            version,
            kind,  # type: ignore[arg-type]
        ),
        reply=Message("assistant", "a"),
        sampling=Sampling.model_validate({"max_tokens": 4, **options}),
        seed=9,
    )


def test_a_later_turn_joins_the_row_when_its_prompt_starts_with_the_ids_held():
    recording = Recording()
    turn(recording, [1, 2], [5, 6])
    turn(recording, [1, 2, 5, 6, 3, 4], [7])
    (row,) = rollout_rows(ATTEMPT, recording, Outcome(), None)
    assert row["token_ids"] == [1, 2, 5, 6, 3, 4, 7]
    assert row["loss_mask"] == [False, False, True, True, False, False, True]
    assert row["logprobs"] == [None, None, -0.5, pytest.approx(-0.6), None, None, pytest.approx(-0.7)]
    assert row["prompt_length"] == 2
    assert (recording.prefix_breaks, recording.sampling_breaks) == (0, 0)


def test_a_prompt_that_tokenises_the_past_otherwise_starts_a_new_row_and_is_counted():
    recording = Recording()
    turn(recording, [1, 2], [5, 6])
    turn(recording, [1, 2, 56, 3], [7])
    first, second = rollout_rows(ATTEMPT, recording, Outcome(), None)
    assert recording.prefix_breaks == 1
    assert (first["token_ids"], second["token_ids"]) == ([1, 2, 5, 6], [1, 2, 56, 3, 7])
    assert (first["turn_index"], second["turn_index"]) == (0, 1)
    assert first["experience_id"] != second["experience_id"]
    assert second["loss_mask"] == [False] * 4 + [True]


def test_a_prompt_shorter_than_the_ids_held_is_a_break():
    recording = Recording()
    turn(recording, [1, 2], [5, 6])
    turn(recording, [1, 2, 5], [7])
    assert recording.prefix_breaks == 1


def test_a_row_states_one_distribution_so_another_temperature_starts_a_new_row():
    recording = Recording()
    turn(recording, [1], [5])
    turn(recording, [1, 5, 2], [6], temperature=0.5, kind="temperature")
    first, second = rollout_rows(ATTEMPT, recording, Outcome(), None)
    assert (recording.prefix_breaks, recording.sampling_breaks) == (0, 1)
    assert (first["logprob_kind"], second["logprob_kind"]) == ("raw", "temperature")
    assert second["sampling"]["temperature"] == 0.5


def test_weight_versions_are_run_lengths_over_sampled_tokens_and_the_oldest_names_the_row():
    recording = Recording()
    turn(recording, [1], [5, 6], version=4)
    turn(recording, [1, 5, 6, 2], [7], version=4)
    turn(recording, [1, 5, 6, 2, 7, 3], [8, 9], version=6)
    (row,) = rollout_rows(ATTEMPT, recording, Outcome(), None)
    assert row["token_versions"] == [{"version": 4, "length": 3}, {"version": 6, "length": 2}]
    assert row["model_version"] == 4


def test_a_failed_attempt_keeps_its_finished_tokens_and_says_why():
    recording = Recording()
    turn(recording, [1], [5])
    (row,) = rollout_rows(ATTEMPT, recording, None, Failure("engine", "it broke"))
    assert (row["error"], row["stop_reason"], row["token_ids"]) == ("engine: it broke", "error", [1, 5])


def test_an_attempt_that_failed_before_its_first_token_is_a_row_with_the_task_s_messages():
    (row,) = rollout_rows(ATTEMPT, Recording(), None, Failure("timeout", "late"))
    assert row["token_ids"] == []
    assert row["messages"][0]["content"] == "q"
    assert (row["stop_reason"], row["truncated"], row["logprobs"]) == ("timeout", True, None)


@pytest.mark.parametrize(
    ("reason", "outcome", "truncated"),
    [
        ("eos", Outcome(), False),
        ("length", Outcome(), True),
        ("eos", Outcome(stop_reason="max_turns"), True),
        ("stop", Outcome(), False),
    ],
)
def test_truncated_says_whether_a_limit_cut_the_row(reason, outcome, truncated):
    recording = Recording()
    turn(recording, [1], [5], reason=reason)
    (row,) = rollout_rows(ATTEMPT, recording, outcome, None)
    assert row["truncated"] is truncated
    assert row["stop_reason"] == (outcome.stop_reason or reason)


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", None])
def test_a_score_that_is_no_finite_number_is_refused_by_name(value):
    with pytest.raises(RolloutError, match="'quality'") as caught:
        check_outcome(Outcome(scores={"quality": value}))
    assert caught.value.kind == "outcome"


def test_info_that_is_not_json_is_refused_by_name():
    with pytest.raises(RolloutError, match="'tool'"):
        check_outcome(Outcome(info={"tool": object()}))
