"""What a run was fed with, so that a resumed run notices when it is not the same any more.

The specification names files and folders; their content can change behind its back. A run that went on with another
model, other tasks or another import would mix what cannot be mixed and report a gain that compares nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from buffer_engine.errors import ConfigError
from buffer_engine.identity import stable_digest
from buffer_engine.store.faults import explained
from explorers.base import Task
from pipelines.checkpoints import file_digest

MODEL_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.json", "*.jinja", "*.model", "*.txt")
"""Files of a model folder that decide what it computes and how it tokenises."""


def model_digest(folder: Path) -> str:
    """Hash of the weights, configuration, tokenizer and chat template in a Hugging Face folder."""
    files = sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern)})
    return stable_digest([[path.name, file_digest(path)] for path in files])


def tasks_digest(tasks: Sequence[Task]) -> str:
    """Hash of task ids in order; an id is a hash of the task's content."""
    return stable_digest([task.task_id for task in tasks])


def check_inputs(path: Path, now: Mapping[str, str]) -> None:
    """Compare the inputs of a run with those it began with (`path`), and note the ones that are new.

    Args:
        now: name (`model policy`, `tasks train`, `import chats`) → digest.

    Raises:
        ConfigError: an input has changed; names it.
    """
    before: dict[str, str] = {}
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
    changed = [name for name, digest in now.items() if before.get(name, digest) != digest]
    if changed:
        raise ConfigError.one(
            f"{', '.join(changed)}: not what this run began with; the content has changed since",
            fix="put the old content back to continue the run, or start a new one under another `name:`",
        )
    if all(name in before for name in now):
        return
    with explained(path, "note the inputs of the run"):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(before | dict(now), file, indent=2, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
