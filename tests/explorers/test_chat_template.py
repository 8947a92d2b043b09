"""Rendering and assistant spans, on templates of several manners (tiny character tokenizer, so counts are by hand)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from buffer_engine.errors import ModelError, RolloutError
from explorers.base import Message
from explorers.models.chat_template import ChatTemplate

DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "<|im_start|>system\nBe kind<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BEGIN_ONCE = (
    "<|endoftext|>{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FORGETFUL = (  # rewrites earlier assistant turns, as templates do that cut old reasoning
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}cut{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ m['content'] }}<|im_end|>{% endfor %}"
)


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


def templated(tokenizer: Any, template: str, *, default_system: bool = True, bos: str | None = None) -> ChatTemplate:
    tokenizer.chat_template = template
    if bos is not None:
        tokenizer.bos_token = bos
    return ChatTemplate(tokenizer, end_ids=frozenset({tokenizer.eos_token_id}), default_system=default_system)


def trained(tokenizer: Any, chat: ChatTemplate, *messages: Message) -> str:
    ids, mask = chat.encode_dialogue(messages)
    return tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on])


USER, REPLY = Message("user", "hi"), Message("assistant", "yo")


def test_a_prompt_is_the_template_with_the_start_of_a_reply(tokenizer):
    chat = templated(tokenizer, DEFAULT_SYSTEM)
    assert tokenizer.decode(list(chat.render([USER]))) == (
        "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_template_s_own_system_turn_can_be_dropped(tokenizer):
    chat = templated(tokenizer, DEFAULT_SYSTEM, default_system=False)
    assert tokenizer.decode(list(chat.render([USER]))) == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_a_system_turn_of_the_task_is_never_dropped(tokenizer):
    chat = templated(tokenizer, DEFAULT_SYSTEM, default_system=False)
    assert "Be terse" in tokenizer.decode(list(chat.render([Message("system", "Be terse"), USER])))


def test_a_beginning_token_written_once_survives_the_drop(tokenizer):
    chat = templated(tokenizer, BEGIN_ONCE, default_system=False, bos="<|endoftext|>")
    assert tokenizer.decode(list(chat.render([USER]))) == "<|endoftext|>[user]hi<|im_end|>[assistant]"


def test_dropping_from_a_template_that_refuses_system_turns_is_a_clear_error(tokenizer):
    with pytest.raises(ModelError, match="default_system: true"):
        templated(tokenizer, NO_SYSTEM, default_system=False)


def test_the_template_hash_tells_templates_and_the_dropped_system_turn_apart(tokenizer):
    hashes = {
        templated(tokenizer, DEFAULT_SYSTEM).hash,
        templated(tokenizer, DEFAULT_SYSTEM, default_system=False).hash,
        templated(tokenizer, BEGIN_ONCE).hash,
    }
    assert len(hashes) == 3


@pytest.mark.parametrize("default_system", [True, False])
def test_replies_and_their_end_tokens_train_and_nothing_else_does(tokenizer, default_system):
    chat = templated(tokenizer, DEFAULT_SYSTEM, default_system=default_system)
    dialogue = (USER, REPLY, Message("user", "assistant"), Message("assistant", "\nassistant"))
    assert trained(tokenizer, chat, *dialogue) == "yo<|im_end|>\nassistant<|im_end|>"


def test_the_ids_of_a_dialogue_begin_with_the_ids_of_its_prompt(tokenizer):
    chat = templated(tokenizer, DEFAULT_SYSTEM, default_system=False)
    ids, mask = chat.encode_dialogue([USER, REPLY])
    prompt = chat.render([USER])
    assert ids[: len(prompt)] == prompt
    assert mask.index(True) == len(prompt)


def test_a_reply_without_an_end_token_trains_whole(tokenizer):
    chat = templated(tokenizer, "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
                                "{% if add_generation_prompt %}assistant:{% endif %}")  # fmt: skip
    assert trained(tokenizer, chat, USER, REPLY) == "yo;"


@pytest.mark.parametrize(
    ("template", "dialogue", "words"),
    [
        (DEFAULT_SYSTEM, [USER], "no assistant turn"),
        (DEFAULT_SYSTEM, [REPLY, USER, REPLY], "begins with an assistant turn"),
        (FORGETFUL, [USER, REPLY, USER, REPLY], "rewrites earlier turns"),
        (NO_SYSTEM, [Message("system", "x"), USER, REPLY], "no system role"),
    ],
)
def test_a_dialogue_that_cannot_be_masked_is_refused_with_the_reason(tokenizer, template, dialogue, words):
    with pytest.raises(RolloutError, match=words):
        templated(tokenizer, template).encode_dialogue(dialogue)


def test_a_token_that_reaches_over_the_border_of_a_reply_is_cut_there():
    """With two newlines as one token, text before and in the reply must still be encoded apart, as sampling does."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<e>": 0, "\n": 1, "a": 2, "u": 3, ":": 4, "\n\n": 5, "[UNK]": 6}
    raw = Tokenizer(models.BPE(vocabulary, [("\n", "\n")], unk_token="[UNK]"))
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens(["<e>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<e>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}:\n{{ m['content'] }}<e>{% endfor %}"
        "{% if add_generation_prompt %}a:\n{% endif %}"
    )
    chat = ChatTemplate(tokenizer, end_ids=frozenset({0}))
    ids, mask = chat.encode_dialogue([Message("user", "u"), Message("assistant", "\na")])
    # u : \n u <e>  a : \n | \n a <e>   (and not "\n\n" as the one token 5)
    assert ids == (3, 4, 1, 3, 0, 2, 4, 1, 1, 2, 0)
    assert mask == (False,) * 8 + (True,) * 3
