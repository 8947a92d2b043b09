"""Choosing tokens: hand-computed distributions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from explorers.base import Sampling
from explorers.models.token_choice import choose_tokens, logprob_kind, uniforms

LOGITS = torch.tensor([[math.log(0.5), math.log(0.25), math.log(0.125), math.log(0.125)]])


def choose(uniform: float, **options: object) -> tuple[int, float]:
    tokens, logprobs = choose_tokens(LOGITS, [Sampling.model_validate(options)], [uniform])
    return tokens[0], logprobs[0]


@pytest.mark.parametrize(
    ("uniform", "token", "probability"),
    [(0.0, 0, 0.5), (0.49, 0, 0.5), (0.51, 1, 0.25), (0.74, 1, 0.25), (0.76, 2, 0.125), (0.9999999, 3, 0.125)],
)
def test_a_uniform_number_falls_into_the_token_s_share(uniform, token, probability):
    chosen, logprob = choose(uniform)
    assert chosen == token
    assert math.exp(logprob) == pytest.approx(probability)


def test_temperature_half_squares_the_probabilities():
    # 1/4 : 1/16 : 1/64 : 1/64 over their sum 11/32.
    assert math.exp(choose(0.0, temperature=0.5)[1]) == pytest.approx(8 / 11)


def test_top_k_keeps_the_largest_and_renormalises():
    assert choose(0.0, top_k=2)[1] == pytest.approx(math.log(2 / 3))
    assert choose(0.9999999, top_k=2) == (1, pytest.approx(math.log(1 / 3)))


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    assert choose(0.9999999, top_p=0.5) == (0, pytest.approx(0.0))
    assert choose(0.9999999, top_p=0.6) == (1, pytest.approx(math.log(1 / 3)))


def test_top_p_applies_to_what_top_k_left():
    # After top_k 2 the shares are 2/3 and 1/3, so 0.6 is reached by the first alone.
    assert choose(0.9999999, top_k=2, top_p=0.6) == (0, pytest.approx(0.0))


def test_greedy_ignores_the_number_and_reports_the_raw_probability():
    assert choose(0.99, temperature=0, top_k=1) == (0, pytest.approx(math.log(0.5)))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "raw"),
        ({"temperature": 0}, "raw"),
        ({"temperature": 0, "top_p": 0.5}, "raw"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_k": 5}, "truncated"),
        ({"temperature": 0.5, "top_p": 0.9}, "truncated"),
    ],
)
def test_the_kind_names_the_distribution(options, kind):
    assert logprob_kind(Sampling.model_validate(options)) == kind


def test_the_nth_number_of_a_seed_does_not_depend_on_how_many_are_drawn():
    assert uniforms(7, 3) == uniforms(7, 10)[:3]
    assert uniforms(7, 3) != uniforms(8, 3)


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=12),
    uniform=st.floats(0, 1, exclude_max=True),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
)
def test_a_chosen_token_is_always_one_that_could_be_drawn(logits, uniform, top_k, top_p, temperature):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=1, stop=())
    tokens, logprobs = choose_tokens(torch.tensor([logits]), [sampling], [uniform])
    assert 0 <= tokens[0] < len(logits)
    assert math.isfinite(logprobs[0])
    assert logprobs[0] <= 1e-6
    if top_k and temperature:
        assert sum(other > logits[tokens[0]] for other in logits) < top_k
