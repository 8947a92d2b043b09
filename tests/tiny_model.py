"""A real but tiny model for tests: a random Llama of some 100k parameters with a tokenizer of single characters."""

from __future__ import annotations

import string
from pathlib import Path

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(folder: Path, *, seed: int = 0, hidden: int = 48, layers: int = 2) -> Path:
    """Write a Hugging Face folder: config, safetensors weights, tokenizer with a chat template. Takes a second."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    characters = sorted(set(string.ascii_letters + string.digits + string.punctuation + " \n"))
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, "[UNK]", *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="[UNK]",
        additional_special_tokens=list(SPECIAL),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=vocabulary["<|im_start|>"],
            eos_token_id=vocabulary["<|im_end|>"],
            pad_token_id=vocabulary["<|endoftext|>"],
        )
    )
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder
