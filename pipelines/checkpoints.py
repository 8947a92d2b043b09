"""Checkpoints on disk: complete or absent, newest found, old ones removed.

A checkpoint holds the trainer's state and the step it stands after. Where the store stands needs no copy: its cursors
and manifests say it, and steps after the checkpoint are replayed from their manifests.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from buffer_engine.errors import BufferEngineError
from trainers.base import Trainer


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """What the loop needs besides the trainer's own files."""

    run_id: str
    step: int
    model_version: int
    store_version: int
    config_hash: str


class CheckpointFolder:
    """All checkpoints of one run."""

    def __init__(self, folder: Path, run_id: str, *, keep: int) -> None:
        self._folder = folder / "checkpoints" / run_id
        self._keep = keep

    def save(self, trainer: Trainer, state: CheckpointState) -> Path:
        """Write the checkpoint of `state.step`, then remove those beyond the newest `keep`.

        Raises:
            BufferEngineError: the disk refused; earlier checkpoints are untouched.
        """
        final = self._folder / f"step-{state.step:06d}"
        partial = self._folder / f".partial-step-{state.step:06d}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            trainer.save_checkpoint(partial / "trainer")
            with open(partial / "state.json", "w", encoding="utf-8") as file:
                json.dump(asdict(state), file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            # Replaying a step writes the checkpoint again; its bytes may differ only outside deterministic mode.
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
            _sync_directory(self._folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise BufferEngineError(
                f"the checkpoint of step {state.step} could not be written to {self._folder}: {error}. "
                "Earlier checkpoints are untouched: free space, then `buffer-engine resume`."
            ) from error
        for old in self._complete()[: -self._keep]:
            shutil.rmtree(old)
        return final

    def latest(self) -> tuple[Path, CheckpointState] | None:
        """The newest complete checkpoint; None when there is none."""
        complete = self._complete()
        if not complete:
            return None
        newest = complete[-1]
        return newest, CheckpointState(**json.loads((newest / "state.json").read_text(encoding="utf-8")))

    def _complete(self) -> list[Path]:
        if not self._folder.exists():
            return []
        return sorted(path for path in self._folder.glob("step-*") if (path / "state.json").exists())


def _sync_directory(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
