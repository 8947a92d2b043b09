"""Meanings of texts as vectors, from a static model: one vector a token, averaged. No network, no torch.

The folder is what model2vec saves: `tokenizer.json`, and `model.safetensors` with the tensor `embeddings`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from buffer_engine.errors import OperatorError
from buffer_engine.extras import require

Vectors = npt.NDArray[np.float64]


class StaticEmbeddings:
    """A static model read from a folder."""

    def __init__(self, folder: Path) -> None:
        """Read the model.

        Raises:
            OperatorError: it is no such model, or one in a packed form (`weights`, `mapping`) that is not read here.
        """
        tensors: Any = require("safetensors.numpy", "embed").load_file(folder / "model.safetensors")
        if set(tensors) != {"embeddings"}:
            held = ", ".join(sorted(tensors))
            raise OperatorError(f"{folder} is no plain static model: it has {held}, not the tensor embeddings alone")
        self._table = tensors["embeddings"].astype(np.float64)
        self._tokenizer: Any = require("tokenizers", "embed").Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        model: dict[str, Any] = json.loads(self._tokenizer.to_str())["model"]
        unknown = model.get("unk_token")
        self._unknown: int | None = None if unknown is None else self._tokenizer.token_to_id(unknown)

    @property
    def size(self) -> int:
        """Numbers in a vector."""
        return int(self._table.shape[1])

    def unit_vectors(self, texts: Sequence[str]) -> Vectors:
        """One vector of length 1 a text, the mean of its tokens' vectors; 0 for a text without a known token."""
        found = np.zeros((len(texts), self.size))
        for place, encoding in enumerate(self._tokenizer.encode_batch(list(texts), add_special_tokens=False)):
            ids = [token for token in encoding.ids if token != self._unknown]
            if ids:
                found[place] = self._table[ids].mean(axis=0)
        lengths = np.linalg.norm(found, axis=1, keepdims=True)
        return np.divide(found, lengths, out=np.zeros_like(found), where=lengths > 0)
