"""Checkpoints on disk: complete and with a checksum, or passed over.

A checkpoint holds the trainer's state and the step it stands after. Where the store stands needs no copy: its cursors
and manifests say it, and steps after the checkpoint are replayed from their manifests. So any checkpoint will do, an
older one only costs time.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from buffer_engine.atomic_folder import atomic_folder
from buffer_engine.errors import BufferEngineError
from trainers.base import Trainer

STATE = "state.json"


class DamagedCheckpointError(BufferEngineError):
    """A checkpoint cannot be used; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """What the loop needs besides the trainer's own files.

    Attributes:
        files: checksum (XXH3-128) of every file of the trainer, by path inside the checkpoint.
    """

    run_id: str
    step: int
    model_version: int
    store_version: int
    config_hash: str
    files: dict[str, str] = field(default_factory=dict)


class CheckpointFolder:
    """All checkpoints of one run."""

    def __init__(self, folder: Path, run_id: str, *, keep: int) -> None:
        self._folder = folder / "checkpoints" / run_id
        self._keep = keep

    def save(self, trainer: Trainer, state: CheckpointState) -> Path:
        """Write the checkpoint of `state.step`, unless it is there; then remove those beyond the newest `keep`.

        Raises:
            BufferEngineError: the disk refused; earlier checkpoints are untouched.
        """
        final = self._folder / f"step-{state.step:06d}"
        if not (final / STATE).exists():
            self._write(trainer, state, final)
        for old in reversed(self.newest_first()[self._keep :]):
            _remove(old)
        return final

    def newest_first(self) -> list[Path]:
        """Folders of complete checkpoints; whether their files are sound is found out by `read`."""
        if not self._folder.exists():
            return []
        return sorted((path for path in self._folder.glob("step-*") if (path / STATE).exists()), reverse=True)

    def read(self, folder: Path) -> CheckpointState:
        """The state of a checkpoint whose files all match their checksums.

        Raises:
            DamagedCheckpointError: a file is missing, torn or altered.
        """
        try:
            fields: Any = json.loads((folder / STATE).read_text(encoding="utf-8"))
            state = CheckpointState(**fields)
        except (OSError, ValueError, TypeError) as error:
            raise DamagedCheckpointError(f"{folder / STATE} cannot be read: {error}") from error
        if not state.files:
            raise DamagedCheckpointError(f"{folder / STATE} lists no files")
        for name, expected in state.files.items():
            if not (folder / name).is_file():
                raise DamagedCheckpointError(f"{folder / name} is missing")
            if file_digest(folder / name) != expected:
                raise DamagedCheckpointError(f"{folder / name} does not match its checksum")
        return state

    def set_aside(self, folder: Path) -> None:
        """Rename a checkpoint that cannot be used, so that its step can be saved again and nothing is lost."""
        aside = folder.with_name(f"unusable-{folder.name}")
        number = 1
        while aside.exists():
            number += 1
            aside = folder.with_name(f"unusable-{number}-{folder.name}")
        os.replace(folder, aside)

    def _write(self, trainer: Trainer, state: CheckpointState, final: Path) -> None:
        try:
            with atomic_folder(final) as partial:
                trainer.save_checkpoint(partial / "trainer")
                files = {
                    str(path.relative_to(partial)): file_digest(path)
                    for path in sorted((partial / "trainer").rglob("*"))
                    if path.is_file()
                }
                (partial / STATE).write_text(json.dumps(asdict(state) | {"files": files}, indent=2), encoding="utf-8")
        except OSError as error:
            raise BufferEngineError(
                f"the checkpoint of step {state.step} could not be written to {self._folder}: {error}. "
                "Earlier checkpoints are untouched: free space, then `buffer-engine resume`."
            ) from error


def file_digest(path: Path) -> str:
    """XXH3-128 of a file's bytes."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _remove(folder: Path) -> None:
    """Remove a checkpoint; without its state first, so that an interrupted removal leaves nothing that looks whole."""
    (folder / STATE).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
