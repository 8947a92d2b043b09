"""From which checkpoint a run goes on: the newest one that is whole and that the store has caught up with."""

from __future__ import annotations

from collections.abc import Callable

from buffer_engine.errors import TrainingError
from buffer_engine.store.base import ExperienceStore
from pipelines.checkpoints import CheckpointFolder, CheckpointState, DamagedCheckpointError
from pipelines.cursors import RunCursors
from trainers.base import Trainer


def restore(
    store: ExperienceStore,
    checkpoints: CheckpointFolder,
    trainer: Trainer,
    *,
    run_id: str,
    passed_over: Callable[[str, str], None],
) -> CheckpointState | None:
    """Load the newest usable checkpoint into `trainer`; None: there is none, the run starts from its first weights.

    A checkpoint is set aside, with its name and the reason, when a file of it is damaged, when the trainer cannot
    load it, or when it holds steps that the store has not committed (an older catalog was put back, or a power cut
    took what `durability: process` does not protect): training on from there would make the manifests untrue.
    """
    done = _done_steps(store, run_id)
    for folder in checkpoints.newest_first():
        try:
            state = checkpoints.read(folder)
            missing = [step for step in range(1, state.step + 1) if not done(step)]
            if missing:
                raise DamagedCheckpointError(f"it holds step {missing[0]}, which the store has not committed")
            trainer.load_checkpoint(folder / "trainer")
        except (DamagedCheckpointError, TrainingError) as error:
            checkpoints.set_aside(folder)
            passed_over(folder.name, str(error))
            continue
        return state
    return None


def _done_steps(store: ExperienceStore, run_id: str) -> Callable[[int], bool]:
    committed = {record.step for record in store.batches(run_id) if record.status == "committed"}
    cursors = RunCursors(run_id)
    return lambda step: step in committed or store.cursor(cursors.skipped(step)) == 1
