"""The README.md that makes a folder of Parquet a dataset of the Hugging Face library.

`datasets.load_dataset(FOLDER, CONFIG)` reads which files belong to which configuration and split from the YAML at its
head, so nothing of that library is needed to write one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

import pyarrow as pa
import pyarrow.types as pt
from ruamel.yaml import YAML

from buffer_engine.errors import ExchangeError
from buffer_engine.exchange.sinks import WrittenFile
from buffer_engine.schema import TABLES

Parts = Mapping[str, Mapping[str, Sequence[WrittenFile]]]
"""Files of each configuration by split."""


def dataset_card(store: str, version: int, parts: Parts, folder: Path) -> str:
    """Text of README.md for files below `folder`."""
    configs = [
        {
            "config_name": name,
            "data_files": [
                {"split": split, "path": [str(file.path.relative_to(folder)) for file in files]}
                for split, files in splits.items()
            ],
        }
        for name, splits in parts.items()
    ]
    head = StringIO()
    yaml = YAML()
    yaml.width = 10_000  # one path a line, however long
    yaml.dump({"configs": configs}, head)
    lines = [f"# Rows of the experience store `{store}`, version {version}", ""]
    for name, splits in parts.items():
        doc = f": {TABLES[name].doc}" if name in TABLES else ""
        counts = ", ".join(f"{sum(file.rows for file in files):,} rows {split}" for split, files in splits.items())
        lines.append(f"- `{name}`{doc or ':'} {counts}.")
    first = next(iter(parts))
    lines += ["", "```python", "from datasets import load_dataset", "", f'rows = load_dataset(".", "{first}")', "```"]
    return f"---\n{head.getvalue()}---\n\n" + "\n".join(lines) + "\n"


def refuse_maps(name: str, schema: pa.Schema) -> None:
    """Refuse a column that the library has no type for.

    Raises:
        ExchangeError: names it.
    """
    for field in schema:
        if pt.is_map(field.type):
            raise ExchangeError(
                f"{name}: column {field.name} is a map, which Hugging Face datasets cannot hold; leave it out by "
                f"naming the others, or select map_entries({field.name})"
            )
