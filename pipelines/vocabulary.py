"""Texts of token ids, for people who look at tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from buffer_engine.errors import UsageError
from buffer_engine.extras import require


def read_vocabulary(folder: Path) -> pa.Table:
    """Columns token_id (int32) and text of every token of a tokenizer folder.

    A token that is only part of a character decodes to the replacement character.

    Raises:
        UsageError: the folder holds no tokenizer.
        MissingExtraError: transformers is not installed.
    """
    transformers = require("transformers", "torch")
    if not folder.is_dir():
        raise UsageError(f"--tokenizer {folder}: no such folder; name a model folder with tokenizer.json")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise UsageError(f"--tokenizer {folder}: no tokenizer can be loaded from it ({reason})") from error
    size = len(tokenizer)
    texts: list[str] = tokenizer.batch_decode([[token] for token in range(size)])
    return pa.table({"token_id": pa.array(np.arange(size, dtype=np.int32)), "text": pa.array(texts, pa.string())})
