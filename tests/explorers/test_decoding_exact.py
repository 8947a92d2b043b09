"""The transformers engine against plain forward passes of the same tiny model, in fp32."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from buffer_engine.errors import ModelError
from buffer_engine.weights import WeightVersion
from explorers.base import Generation, GenerationRequest, Message, Sampling
from explorers.models.transformers_model import TransformersConfig, TransformersEngine


def sampling(**options: object) -> Sampling:
    return Sampling.model_validate({"max_tokens": 12, **options})


def request(engine: TransformersEngine, text: str, seed: int, **options: object) -> GenerationRequest:
    return GenerationRequest(engine.render([Message("user", text)]), sampling(**options), seed)


def plain_logprobs(engine: TransformersEngine, prompt: tuple[int, ...], reply: tuple[int, ...], temperature: float = 1):
    """Log-softmax of one unpadded forward pass, at the reply's tokens: tensor [len(reply), V]."""
    ids = torch.tensor([[*prompt, *reply]])
    with torch.no_grad():
        logits = engine._network(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1)


def at_reply(logprobs: torch.Tensor, reply: tuple[int, ...]) -> torch.Tensor:
    return logprobs.gather(1, torch.tensor(reply)[:, None])[:, 0]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> TransformersEngine:
    return TransformersEngine(TransformersConfig(path=str(tiny_model), max_batch=16))


MIXED = ["a", "what is 12 + 7?", "say something long about a king and his dog", "a"]


@pytest.mark.parametrize(
    ("options", "temperature", "kind"), [({}, 1.0, "raw"), ({"temperature": 0.7}, 0.7, "temperature")]
)
def test_logprobs_of_a_padded_batch_equal_a_plain_forward_pass(engine, options, temperature, kind):
    requests = [request(engine, text, seed, **options) for seed, text in enumerate(MIXED)]
    for asked, found in zip(requests, engine.generate(requests), strict=True):
        exact = at_reply(plain_logprobs(engine, asked.prompt_ids, found.token_ids, temperature), found.token_ids)
        assert torch.allclose(torch.tensor(found.logprobs), exact, atol=1e-5)
        assert found.logprob_kind == kind


def test_greedy_takes_the_largest_logit_and_reports_raw_logprobs(engine):
    asked = request(engine, "hello", 5, temperature=0)
    (found,) = engine.generate([asked])
    exact = plain_logprobs(engine, asked.prompt_ids, found.token_ids)
    assert found.token_ids == tuple(exact.argmax(dim=-1).tolist())
    assert torch.allclose(torch.tensor(found.logprobs), exact.max(dim=-1).values, atol=1e-5)
    assert found.logprob_kind == "raw"


def test_truncated_logprobs_are_renormalised_over_the_tokens_that_could_be_drawn(engine):
    asked = request(engine, "hello", 5, top_k=3)
    (found,) = engine.generate([asked])
    best, ids = plain_logprobs(engine, asked.prompt_ids, found.token_ids).topk(3, dim=-1)
    renormalised = best - best.logsumexp(dim=-1, keepdim=True)
    for step, token in enumerate(found.token_ids):
        place = ids[step].tolist().index(token)
        assert found.logprobs[step] == pytest.approx(renormalised[step, place].item(), abs=1e-5)
    assert found.logprob_kind == "truncated"


def test_tokens_do_not_depend_on_what_else_is_in_the_batch(engine):
    requests = [request(engine, text, 100 + at) for at, text in enumerate(MIXED * 3)]
    together = engine.generate(requests)
    backwards = list(reversed(engine.generate(list(reversed(requests)))))
    alone = [engine.generate([asked])[0] for asked in requests]
    assert [g.token_ids for g in together] == [g.token_ids for g in alone] == [g.token_ids for g in backwards]


def test_siblings_with_other_seeds_differ_and_one_seed_repeats(engine):
    first, second, again = engine.generate([request(engine, "a", seed, max_tokens=20) for seed in (1, 2, 1)])
    assert first.token_ids == again.token_ids
    assert first.token_ids != second.token_ids


def test_rows_that_end_early_leave_the_batch_and_the_others_stay_exact(engine):
    limits = [1, 9, 3, 25]
    requests = [request(engine, text, at, max_tokens=limits[at]) for at, text in enumerate(MIXED)]
    widths: list[int] = []
    hook = engine._network.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    found = engine.generate(requests)
    hook.remove()
    assert widths == sorted(widths, reverse=True) or widths[0] == 3  # three distinct prompts are read once
    assert widths[-1] == 1
    for asked, one, most in zip(requests, found, limits, strict=True):
        assert len(one.token_ids) == most or one.stop_reason == "eos"
        exact = at_reply(plain_logprobs(engine, asked.prompt_ids, one.token_ids), one.token_ids)
        assert torch.allclose(torch.tensor(one.logprobs), exact, atol=1e-5)


def test_equal_prompts_are_read_once(engine):
    shapes: list[tuple[int, ...]] = []
    hook = engine._network.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    engine.generate([request(engine, "a", seed, max_tokens=2) for seed in range(8)])
    hook.remove()
    assert shapes[0][0] == 1
    assert shapes[1] == (8, 1)


def force(engine: TransformersEngine, tokens: list[int]) -> object:
    """Make the model want `tokens`, one after another, whatever it read."""
    step = iter(tokens)

    def overwrite(module: object, args: object, output: object) -> object:
        wanted = next(step)
        output.logits[:, -1] = -100.0
        output.logits[:, -1, wanted] = 100.0
        return output

    return engine._network.register_forward_hook(overwrite)


def ids_of(engine: TransformersEngine, text: str) -> list[int]:
    return list(engine._tokenizer(text, add_special_tokens=False)["input_ids"])


def test_an_end_token_ends_a_reply_and_is_part_of_it(engine):
    end = engine._tokenizer.eos_token_id
    hook = force(engine, [*ids_of(engine, "ok"), end])
    (found,) = engine.generate([request(engine, "a", 1)])
    hook.remove()
    assert (found.stop_reason, found.eos_sampled) == ("eos", True)
    assert found.token_ids[-1] == end
    assert engine.decode(found.token_ids) == "ok"


def test_a_stop_string_ends_a_reply_even_across_tokens_and_stays_in_it(engine):
    hook = force(engine, ids_of(engine, "so it is. STOP here"))
    (found,) = engine.generate([request(engine, "a", 1, max_tokens=19, stop=("STOP",))])
    hook.remove()
    assert (found.stop_reason, found.eos_sampled) == ("stop", False)
    assert engine.decode(found.token_ids) == "so it is. STOP"


def test_the_token_limit_is_a_stop_reason_of_its_own(engine):
    hook = force(engine, ids_of(engine, "abcdef"))
    (found,) = engine.generate([request(engine, "a", 1, max_tokens=4)])
    hook.remove()
    assert (found.stop_reason, found.eos_sampled, engine.decode(found.token_ids)) == ("length", False, "abcd")


def test_a_prompt_that_does_not_fit_fails_alone(engine):
    # 16 tokens around the text: <start>user\n (6), <end>\n (2), <start>assistant\n (11) make 19 without it.
    fits, too_long = request(engine, "x" * 200, 1, max_tokens=300), request(engine, "x" * 400, 1)
    good, bad = engine.generate([fits, too_long])
    assert bad.error == f"context: the prompt has {len(too_long.prompt_ids)} tokens and the context holds 256"
    assert bad.token_ids == ()
    assert good.error is None
    assert len(fits.prompt_ids) + len(good.token_ids) <= 256


def test_a_full_context_ends_a_reply_as_length(engine):
    asked = request(engine, "x" * 230, 1, max_tokens=300)
    room = 256 - len(asked.prompt_ids)
    hook = force(engine, ids_of(engine, "y") * room)
    (found,) = engine.generate([asked])
    hook.remove()
    assert (found.stop_reason, len(found.token_ids)) == ("length", room)


def test_logits_that_are_not_finite_fail_the_row_with_a_reason(engine):
    def poison(module: object, args: object, output: object) -> object:
        output.logits[0, -1, 7] = float("nan")
        return output

    hook = engine._network.register_forward_hook(poison)
    bad, good = engine.generate([request(engine, "a", 1), request(engine, "b", 1)])
    hook.remove()
    assert bad.stop_reason == "error"
    assert bad.error is not None
    assert "not finite" in bad.error
    # The bad row has left, so the next first row is the other one: it fails one token later.
    assert len(good.token_ids) == 1


def test_a_cancelled_row_stops_at_once_and_the_others_go_on(engine):
    asked = [request(engine, text, 3, max_tokens=8) for text in ("a", "b")]
    gone, stays = engine.generate(asked, cancelled=lambda index: index == 0)
    (alone,) = engine.generate(asked[1:])
    assert gone.error is not None
    assert gone.error.startswith("cancelled")
    assert stays.token_ids == alone.token_ids


def test_batches_beyond_the_largest_allowed_give_the_same_replies(tiny_model: Path, engine):
    small = TransformersEngine(TransformersConfig(path=str(tiny_model), max_batch=3))
    requests = [request(engine, text, at) for at, text in enumerate(MIXED * 2)]
    assert [g.token_ids for g in small.generate(requests)] == [g.token_ids for g in engine.generate(requests)]


def test_eager_attention_gives_the_same_logprobs(tiny_model: Path, engine):
    eager = TransformersEngine(TransformersConfig(path=str(tiny_model), attention="eager"))
    requests = [request(engine, text, at) for at, text in enumerate(MIXED)]
    for one, other in zip(eager.generate(requests), engine.generate(requests), strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def _spread(found: list[Generation]) -> dict[int, float]:
    counts: dict[int, float] = {}
    for one in found:
        counts[one.token_ids[0]] = counts.get(one.token_ids[0], 0) + 1 / len(found)
    return counts


def test_sampled_frequencies_follow_the_stated_probabilities(engine):
    asked = [request(engine, "a", seed, max_tokens=1, temperature=0.2) for seed in range(600)]
    found = engine.generate(asked)
    stated = {one.token_ids[0]: math.exp(one.logprobs[0]) for one in found}
    spread = _spread(found)
    token = max(stated, key=lambda one: stated[one])
    # Standard error of a share p over 600 draws is sqrt(p (1 - p) / 600) <= 0.0205; four of them.
    assert spread[token] == pytest.approx(stated[token], abs=0.082)


def test_newer_weights_are_copied_cast_and_change_the_logprobs(tiny_model: Path):
    engine = TransformersEngine(TransformersConfig(path=str(tiny_model)))
    own = engine._network.state_dict()
    tensors = {name: (tensor * 1.5).to(torch.bfloat16) for name, tensor in own.items() if name != "lm_head.weight"}
    before = own["model.norm.weight"].clone()
    engine.load_weights(WeightVersion(3, tensors=tensors))
    assert engine.model_version == 3
    assert torch.allclose(own["model.norm.weight"], before * 1.5, atol=0.01)
    assert own["model.norm.weight"].dtype == torch.float32
    # Tied embeddings: the head follows although it was not sent.
    assert torch.equal(engine._network.lm_head.weight, engine._network.model.embed_tokens.weight)
    assert engine.generate([request(engine, "a", 1)])[0].model_version == 3


def test_weights_from_a_folder_equal_the_folder(tiny_model: Path, tmp_path: Path):
    from tiny_model import make_tiny_model

    other = make_tiny_model(tmp_path / "other", seed=1)
    engine = TransformersEngine(TransformersConfig(path=str(tiny_model)))
    engine.load_weights(WeightVersion(1, directory=other))
    fresh = TransformersEngine(TransformersConfig(path=str(other)))
    asked = [request(engine, "a", 1)]
    assert engine.generate(asked)[0].logprobs == fresh.generate(asked)[0].logprobs


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t | {"stranger": torch.zeros(1)}, "unknown: stranger"),
        (lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"}, "missing: model.norm.weight"),
        (lambda t: t | {"model.norm.weight": torch.zeros(3)}, r"shape: model.norm.weight \(3,\) instead of \(48,\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_changes(tiny_model: Path, change, words):
    engine = TransformersEngine(TransformersConfig(path=str(tiny_model)))
    own = {name: tensor.clone() for name, tensor in engine._network.state_dict().items()}
    with pytest.raises(ModelError, match=words):
        engine.load_weights(WeightVersion(1, tensors=change({name: tensor + 1 for name, tensor in own.items()})))
    assert engine.model_version == 0
    assert all(torch.equal(tensor, own[name]) for name, tensor in engine._network.state_dict().items())


def test_a_wrong_dtype_is_a_configuration_error():
    with pytest.raises(ValidationError, match="float32"):
        TransformersConfig.model_validate({"type": "transformers", "path": "x", "dtype": "float16"})


def test_bfloat16_runs(tiny_model: Path):
    engine = TransformersEngine(TransformersConfig(path=str(tiny_model), dtype="bfloat16"))
    (found,) = engine.generate([request(engine, "a", 1)])
    assert len(found.token_ids) == len(found.logprobs) > 0
