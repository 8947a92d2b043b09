"""Texts of token ids, for people who look at tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from buffer_engine.errors import UsageError
from buffer_engine.extras import require
from explorers.models.weights_cache import PACKAGED, cached_folder, packaged_folder

FILE = "tokenizer.json"


def read_vocabulary(source: Path) -> pa.Table:
    """Columns token_id (int32) and text of every token of a tokenizer; ids that it does not use are left out.

    A token that is only part of a character decodes to the replacement character. The file is read without a model
    library, whose import alone takes longer than everything else here.

    Args:
        source: folder that holds tokenizer.json, or the name of a packaged model.

    Raises:
        UsageError: there is no tokenizer.
        MissingExtraError: the package tokenizers is not installed.
    """
    tokenizers = require("tokenizers", "torch")
    file = _folder(source) / FILE
    if not file.is_file():
        raise UsageError(
            f"--tokenizer {source}: there is no {file}; name a model folder that holds {FILE}, or one of: "
            + ", ".join(sorted(PACKAGED))
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises nothing narrower
        raise UsageError(f"--tokenizer {source}: {file} is no tokenizer ({error})") from error
    ids = sorted(set(tokenizer.get_vocab(with_added_tokens=True).values()))
    texts: list[str] = tokenizer.decode_batch([[token] for token in ids], skip_special_tokens=False)
    return pa.table({"token_id": pa.array(np.array(ids, dtype=np.int32)), "text": pa.array(texts, pa.string())})


def _folder(source: Path) -> Path:
    name = str(source)
    if source.is_dir() or name not in PACKAGED:
        return source
    made = cached_folder(name)
    return made if (made / FILE).is_file() else packaged_folder(name)
