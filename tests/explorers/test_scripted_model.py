"""The scripted model: a whole engine without a model library."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from buffer_engine.weights import WeightVersion
from explorers.base import GenerationRequest, Message, Sampling
from explorers.models.scripted import END, ScriptedConfig, ScriptedEngine


def engine(replies: object, **options: object) -> ScriptedEngine:
    return ScriptedEngine(ScriptedConfig.model_validate({"replies": replies, **options}))


def say(model: ScriptedEngine, *messages: Message, seed: int = 0, **options: object):
    sampling = Sampling.model_validate({"max_tokens": 20, **options})
    (found,) = model.generate([GenerationRequest(model.render(messages), sampling, seed)])
    return found


USER = Message("user", "what is 2 and 3?")


def test_the_first_pattern_that_matches_the_last_turn_replies():
    model = engine({"bye": "ciao", "what": ["five"], "": ["hm"]})
    assert model.decode(say(model, USER).token_ids) == "five"
    assert model.decode(say(model, USER, Message("assistant", "what"), Message("user", "bye")).token_ids) == "ciao"
    assert model.decode(say(model, Message("user", "…")).token_ids) == "hm"


def test_groups_of_the_pattern_can_be_said():
    model = engine({r"(\d) and (\d)": r"\2\1"})
    assert model.decode(say(model, USER).token_ids) == "32"


def test_choices_follow_their_weights_and_carry_their_logprob_on_the_first_token():
    model = engine([{"text": "a", "weight": 3}, "b"])
    found = [say(model, USER, seed=seed) for seed in range(400)]
    share = sum(model.decode(one.token_ids) == "a" for one in found) / 400
    assert share == pytest.approx(0.75, abs=0.087)  # four standard errors of sqrt(0.75 · 0.25 / 400)
    for one in found:
        first = math.log(0.75 if model.decode(one.token_ids) == "a" else 0.25)
        assert one.logprobs == (pytest.approx(first), 0.0)
    assert {model.decode(say(model, USER, seed=seed, temperature=0).token_ids) for seed in range(9)} == {"a"}


def test_ends_limits_and_stop_strings_are_told_apart():
    model = engine(["one two"])
    assert (say(model, USER).stop_reason, say(model, USER).token_ids[-1]) == ("eos", END)
    cut = say(model, USER, max_tokens=3)
    assert (model.decode(cut.token_ids), cut.stop_reason, cut.eos_sampled) == ("one", "length", False)
    stopped = say(model, USER, stop=("e t", "two"))
    assert (model.decode(stopped.token_ids), stopped.stop_reason) == ("one t", "stop")


def test_a_reply_that_never_ends_fills_the_limit():
    found = say(engine([{"text": "ab", "end": False}]), USER, max_tokens=7)
    assert (engine(["x"]).decode(found.token_ids), found.stop_reason) == ("abababa", "length")


def test_no_pattern_for_a_prompt_is_an_error_that_lists_them():
    with pytest.raises(RuntimeError, match="patterns: 'bye'"):
        say(engine({"bye": "ciao"}), USER)


def test_a_dialogue_s_ids_begin_with_its_prompt_and_only_replies_train():
    model = engine(["x"])
    ids, mask = model.encode_dialogue([USER, Message("assistant", "fünf")])
    prompt = model.render([USER])
    assert ids[: len(prompt)] == prompt
    assert model.decode([token for token, on in zip(ids, mask, strict=True) if on]) == "fünf"
    assert sum(mask) == 5 + 1  # ü is two bytes, and the end


def test_text_with_any_bytes_survives():
    model = engine({"\0": "nul"})
    assert model.decode(say(model, Message("user", "a\0b")).token_ids) == "nul"


def test_newer_weights_change_the_version_alone():
    model = engine(["x"])
    model.load_weights(WeightVersion(7))
    assert say(model, USER).model_version == 7


@pytest.mark.parametrize(
    "replies", [{}, {"a": []}, {"(": ["x"]}, {"a": [r"\3"]}, {"a": [{"text": "x", "weight": 0}]}, {"a": [{"txt": "x"}]}]
)
def test_scripts_that_cannot_work_are_configuration_errors(replies):
    with pytest.raises(ValidationError):
        ScriptedConfig.model_validate({"replies": replies})
