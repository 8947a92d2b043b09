"""The packaged model: template, spans, and log-probs against a plain forward pass."""

from __future__ import annotations

import pytest
import torch

from explorers.base import GenerationRequest, Message, Sampling
from explorers.models.transformers_model import TransformersConfig, TransformersEngine


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_renders_masks_and_samples_exactly():
    engine = TransformersEngine(TransformersConfig(path="smollm2-135m", default_system=False, threads=1))
    user = Message("user", "What is 3 + 4? Reply with only the number.")
    prompt = engine.render([user])
    text = "<|im_start|>user\nWhat is 3 + 4? Reply with only the number.<|im_end|>\n<|im_start|>assistant\n"
    assert engine._tokenizer.decode(list(prompt)) == text
    assert len(prompt) == 24
    ids, mask = engine.encode_dialogue(
        [user, Message("assistant", "7"), Message("user", "?"), Message("assistant", "\n8")]
    )
    assert ids[:24] == prompt
    trained = [token for token, on in zip(ids, mask, strict=True) if on]
    assert engine._tokenizer.decode(trained) == "7<|im_end|>\n8<|im_end|>"

    sampling = Sampling.model_validate({"max_tokens": 8})
    others = [engine.render([Message("user", "Tell me a story about a king and his dog.")])]
    requests = [GenerationRequest(ids, sampling, seed) for seed, ids in enumerate([prompt, *others, prompt])]
    for asked, found in zip(requests, engine.generate(requests), strict=True):
        with torch.no_grad():
            whole = torch.tensor([[*asked.prompt_ids, *found.token_ids]])
            logits = engine._network(input_ids=whole).logits[0, len(asked.prompt_ids) - 1 : -1]
        exact = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(found.logprobs), exact, atol=1e-4)
