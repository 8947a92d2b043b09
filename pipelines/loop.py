"""The loop: explore, curate, train, publish, evaluate, checkpoint, and the same again after a crash.

Every phase of a step asks the store whether it is done and skips it if so. A resumed run is therefore the same loop,
started after the newest checkpoint: steps whose batch is already in the store are trained again from their manifests
(their effect on the lost weights is what is being restored), everything later happens for the first time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from buffer_engine.errors import StarvedError, TrainingError
from buffer_engine.store.base import ReadPolicy
from buffer_engine.store.faults import explained
from explorers.sampler import plan_groups, select
from pipelines.assemble import Assembly, Part
from pipelines.batches import assemble_batch, stored_manifest
from pipelines.checkpoints import CheckpointFolder, CheckpointState
from pipelines.cursors import RunCursors
from pipelines.evaluation import evaluate
from pipelines.exploration import explore_groups
from pipelines.forming import listed_rejects, reserve_batch, starve
from pipelines.importing import import_all
from pipelines.metrics import MetricWriter
from pipelines.progress import Progress
from pipelines.restoring import restore
from pipelines.rows import event_row, model_row, token_stats_rows
from trainers.algorithms.base import Algorithm
from trainers.registry import ALGORITHMS


@dataclass(slots=True)
class LoopOutcome:
    """How far a loop came."""

    steps: int = 0
    trained_steps: int = 0
    replayed_steps: int = 0
    skipped_steps: int = 0
    curated_rows: int = 0
    final_weights: Path | None = None
    stopped: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


class Loop:
    """One run, synchronous."""

    def __init__(
        self,
        assembly: Assembly,
        writer: MetricWriter,
        progress: Progress,
        *,
        parts: Collection[Part],
        after_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._assembly = assembly
        self._store = assembly.store
        self._spec = assembly.spec
        self._run_id = assembly.run_id
        self._writer = writer
        self._progress = progress
        self._parts = parts
        self._after_step = after_step
        self._cursors = RunCursors(assembly.run_id)
        trainer: Any = assembly.spec.trainer
        self._read: ReadPolicy = trainer.read if trainer is not None else ReadPolicy.model_validate({})
        self._algorithm: Algorithm[Any] | None = (
            ALGORITHMS.load(trainer.algorithm.type)(trainer.algorithm) if trainer is not None else None
        )
        self._checkpoint_every: int = trainer.checkpoint.every_steps if trainer is not None else 0
        self._checkpoints = CheckpointFolder(
            assembly.folder, assembly.run_id, keep=trainer.checkpoint.keep if trainer is not None else 1
        )
        self._version = 0
        self._outcome = LoopOutcome()

    def run(self) -> LoopOutcome:
        """Do all steps that are not done.

        Raises:
            StarvedError: nothing to train on after the stated refills.
            BufferEngineError: any other failure, named; what was acknowledged stays.
        """
        self._release_unprepared()
        first = self._restore() + 1
        import_all(self._assembly, self._progress)
        steps = self._spec.loop.steps
        if self._assembly.evaluator is not None and first == 1:
            self._evaluate(0)
        with self._progress.steps(total=steps, start=first - 1):
            for step in range(first, steps + 1):
                started = time.perf_counter()
                if not self._step(step, last=step == steps):
                    # An offline run that has used up its rows ends here; what it trained must not be lost.
                    if self._outcome.trained_steps and self._assembly.trainer is not None:
                        self._save_checkpoint(step - 1)
                    break
                self._outcome.steps += 1
                self._progress.step_done(step, time.perf_counter() - started)
                self._after_step(step)
        self._finish()
        return self._outcome

    def _step(self, step: int, *, last: bool) -> bool:
        """One step; False when there is nothing left to do (curation and offline runs that ran dry)."""
        trainer = self._assembly.trainer
        if trainer is None:
            explores = "explore" in self._parts and self._assembly.explorer is not None
            if explores and self._store.cursor(self._cursors.explored(step)) == 0:
                self._explore(step, 0)
            if "curate" in self._parts:
                self._curate(step)
            return self._assembly.explorer is not None
        if self._store.cursor(self._cursors.skipped(step)):
            self._outcome.skipped_steps += 1
        elif not self._train(step):
            return False
        evaluates = self._assembly.evaluator is not None and self._evaluation_due(step, last=last)
        if evaluates or last or step % self._spec.loop.publish_every == 0:
            self._publish()
        if evaluates:
            self._evaluate(step)
        if last or step % self._checkpoint_every == 0:
            self._save_checkpoint(step)
        return True

    # --- phases -----------------------------------------------------------------------------------------------------

    def _explore(self, step: int, refill: int) -> None:
        explorer, section = self._assembly.explorer, self._spec.explorer
        assert explorer is not None
        assert section is not None
        index = self._store.cursor(self._cursors.explorations)
        picked = select(
            self._assembly.tasks[section.tasks],
            start=index * section.tasks_per_step,
            count=section.tasks_per_step,
            order=section.order,
            seed=self._spec.seed,
        )
        groups = plan_groups(picked, run_id=self._run_id, group_size=section.group_size)
        with self._progress.phase(f"step {step}: exploring", total=len(groups) * section.group_size) as advance:
            numbers = explore_groups(
                self._store,
                explorer,
                groups,
                run_id=self._run_id,
                step=step,
                partition="train",
                chunk_cursor=self._cursors.chunks(step, refill),
                done_cursors={self._cursors.explored(step): refill + 1, self._cursors.explorations: index + 1},
                on_chunk=lambda chunk: advance(chunk.rollouts.num_rows),
                on_invalid=self._spec.store.on_invalid,
            )
        self._mirror(step, numbers)

    def _curate(self, step: int) -> None:
        with self._progress.phase(f"step {step}: curating", total=None) as advance:
            for summary in self._assembly.curator.curate_new(step=step, model_version=self._version):
                advance(summary.rows)
                self._outcome.curated_rows += summary.rows
                for of_step, numbers in summary.numbers.items():
                    self._mirror(of_step, numbers)

    def _train(self, step: int) -> bool:
        """Form or find the step's batch, train it, commit it; False when an offline run has no rows left."""
        trainer: Any = self._assembly.trainer
        assert trainer is not None
        batch_id = f"{self._run_id}/{step}"
        batch, rows = stored_manifest(self._store, batch_id)
        replay = batch.num_rows == 1
        if not replay:
            fresh = self._form_batch(step, batch_id)
            if fresh is None:
                if self._store.cursor(self._cursors.skipped(step)):
                    self._outcome.skipped_steps += 1
                    return True
                return False
            batch, rows = fresh
        train_batch = assemble_batch(self._store, batch, rows)
        if train_batch.model_version != self._version:
            raise TrainingError(
                f"batch {batch_id} was formed for weight version {train_batch.model_version}, "
                f"but the trainer holds version {self._version}: the checkpoint folder does not belong to this store"
            )
        with self._progress.phase(f"step {step}: {'replaying' if replay else 'training'}", total=None):
            if replay and self._algorithm is not None and self._algorithm.needs.reward_penalty:
                # The manifest's advantages hold the penalty already; the trainer only wants to have been asked.
                trainer.kl_penalties(train_batch)
            report = trainer.train_step(train_batch)
        version = self._version + 1
        self._store.commit_batch(
            batch_id,
            step=step,
            model=self._model_row(step, version, parent=self._version),
            token_stats=token_stats_rows(self._run_id, train_batch, report.token_stats),
        )
        self._version = version
        self._outcome.trained_steps += 1
        self._outcome.replayed_steps += int(replay)
        versions = train_batch.rows.column("model_version").to_pylist()
        lags = [train_batch.model_version - value for value in versions if value is not None]
        numbers = {f"train/{name}": value for name, value in report.metrics.items()}
        numbers["train/rows"] = float(train_batch.rows.num_rows)
        if lags:
            numbers["train/staleness_max"] = float(max(lags))
        self._writer.write(step, numbers)
        self._note(step, numbers)
        return True

    def _form_batch(self, step: int, batch_id: str) -> tuple[pa.Table, pa.Table] | None:
        """Explore and curate until a batch can be reserved, then write its manifest."""
        explores = self._assembly.explorer is not None and "explore" in self._parts
        while True:
            done = self._store.cursor(self._cursors.explored(step))
            if explores and done == 0:
                self._explore(step, 0)
                done = 1
            if "curate" in self._parts:
                self._curate(step)
            assert self._algorithm is not None
            manifest = reserve_batch(
                self._assembly,
                self._algorithm,
                self._read,
                step=step,
                batch_id=batch_id,
                model_version=self._version,
            )
            if manifest is not None:
                return manifest
            if not explores:
                self._outcome.stopped = "no rows are left to train on"
                return None
            if done > self._spec.loop.max_refills:
                starve(self._assembly, self._read, step=step, explorations=done)
                return None
            self._progress.say(
                f"step {step}: operators left fewer than {self._read.min_rows} rows to train on, so more tasks are "
                f"played (refill {done} of {self._spec.loop.max_refills})"
            )
            self._explore(step, done)

    def _evaluate(self, step: int) -> None:
        section, evaluator = self._spec.loop.evaluate, self._assembly.evaluator
        assert section is not None
        assert evaluator is not None
        if self._store.cursor(self._cursors.evaluated(step)):
            return
        tasks = self._assembly.tasks[section.tasks][: section.limit]
        total = len(tasks) * section.samples_per_task
        with self._progress.phase(f"step {step}: evaluating", total=total) as advance:
            numbers = evaluate(
                self._store,
                evaluator,
                self._assembly.curator,
                tasks,
                run_id=self._run_id,
                name=section.tasks,
                step=step,
                model_version=self._version,
                samples_per_task=section.samples_per_task,
                solved=section.solved,
                on_chunk=lambda chunk: advance(chunk.rollouts.num_rows),
            )
        self._mirror(step, numbers)

    # --- bookkeeping ------------------------------------------------------------------------------------------------

    def _release_unprepared(self) -> None:
        """Reservations of a killed process: we hold the run's lock, so nobody uses them."""
        for record in self._store.batches(self._run_id):
            if record.status == "reserved":
                self._store.release(record.batch_id)

    def _restore(self) -> int:
        """Load the newest usable checkpoint; returns its step (0: the start)."""
        trainer = self._assembly.trainer
        if trainer is None:
            return 0
        state = restore(self._store, self._checkpoints, trainer, run_id=self._run_id, passed_over=self._passed_over)
        step = 0 if state is None else state.step
        self._version = 0 if state is None else state.model_version
        if state is not None:
            self._event(step, "resumed", 1, f"from the checkpoint of step {step}")
        versions = self._store.table("models", columns=["run_id"]).column("run_id").to_pylist()
        if self._run_id not in versions:
            self._store.append("models", self._model_row(0, 0, parent=None))
        begun = step or any(record.step for record in self._store.batches(self._run_id))
        if begun:
            self._progress.say(f"continuing after step {step}; later batches in the store are trained again first")
        self._publish()
        return step

    def _passed_over(self, name: str, reason: str) -> None:
        self._progress.say(f"checkpoint {name} is set aside: {reason}")
        self._event(0, "checkpoint_set_aside", 1, f"{name}: {reason}")

    def _publish(self) -> None:
        trainer, engine = self._assembly.trainer, self._assembly.engine
        if trainer is None or engine is None or self._assembly.explorer is None:
            return
        latest = self._assembly.channel.latest()
        if latest is None or latest.version != self._version:
            weights = trainer.weights(self._version)
            self._assembly.channel.publish(weights)
            engine.load_weights(weights)

    def _save_checkpoint(self, step: int) -> None:
        trainer = self._assembly.trainer
        assert trainer is not None
        with self._progress.phase(f"step {step}: saving a checkpoint", total=None):
            self._checkpoints.save(
                trainer,
                CheckpointState(self._run_id, step, self._version, self._store.version(), self._assembly.config_hash),
            )

    def _finish(self) -> None:
        """Save the final weights if they are not saved yet, then mark a whole run finished.

        Raises:
            StarvedError: there was nothing to train on in the whole run, so its weights are the first ones.
        """
        trainer = self._assembly.trainer
        if trainer is not None:
            if self._version == 0:
                raise StarvedError(
                    f"run {self._run_id} trained nothing in {self._outcome.steps} steps. Rejected or held: "
                    f"{listed_rejects(self._store, self._run_id)}. "
                    f"`buffer-engine sql {self._assembly.folder} --name why_rejected` shows details"
                )
            folder = self._assembly.folder / "weights" / self._run_id
            if self._store.cursor(self._cursors.weights_saved) != self._version or not folder.exists():
                with self._progress.phase("saving the final weights", total=None):
                    with explained(folder, "save the final weights"):
                        trainer.save_weights(folder)
                self._store.append_all({}, cursors={self._cursors.weights_saved: self._version})
            self._outcome.final_weights = folder
        if set(self._parts) >= {"explore", "curate", "train"}:
            self._store.append_all({}, cursors={self._cursors.finished: 1})

    def _evaluation_due(self, step: int, *, last: bool) -> bool:
        section = self._spec.loop.evaluate
        return section is not None and (last or step % section.every_steps == 0)

    def _mirror(self, step: int, numbers: Mapping[str, float]) -> None:
        """Show numbers that the store has already."""
        if numbers:
            self._writer.mirror(step, numbers)
            self._note(step, numbers)

    def _note(self, step: int, numbers: Mapping[str, float]) -> None:
        self._progress.note(step, numbers)
        self._outcome.metrics.update(numbers)

    def _model_row(self, step: int, version: int, *, parent: int | None) -> pa.Table:
        return model_row(self._run_id, step, version, parent=parent, config_hash=self._assembly.config_hash)

    def _event(self, step: int, kind: str, count: int, detail: str) -> None:
        self._store.append("events", event_row(self._run_id, step, kind, count, detail))
