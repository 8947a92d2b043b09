"""One run from start to end: choose it, lock it, assemble it, loop, report."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from buffer_engine.errors import UsageError
from buffer_engine.store import open_store
from pipelines.assemble import ALL_PARTS, Part, assemble, open_run_store
from pipelines.cursors import RunCursors
from pipelines.housekeeping import Housekeeper
from pipelines.load import LoadedSpec, load_spec, resolved_yaml
from pipelines.loop import Loop, LoopOutcome
from pipelines.metrics import MetricWriter
from pipelines.plan import Plan, build_plan
from pipelines.progress import Progress
from pipelines.rows import event_row
from pipelines.runs import RunStart, choose_run, save_specification, specification_path, unfinished_run
from pipelines.secrets import reveal


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run was called, whether it was continued, and how far it came."""

    run_id: str
    folder: Path
    continued: bool
    outcome: LoopOutcome


def start_run(loaded: LoadedSpec, console: Console, *, parts: Collection[Part] = ALL_PARTS) -> RunReport:
    """Run a specification by the rule of `choose_run`.

    Raises:
        BufferEngineError: with the fix; nothing acknowledged is lost.
    """
    plan = build_plan(loaded)
    store = open_run_store(plan.spec)
    try:
        start = choose_run(
            store,
            Path(reveal(plan.spec.store).path),
            plan.spec.name,
            plan.config_hash,
            whole=set(parts) == set(ALL_PARTS),
        )
    finally:
        store.close()
    return _run(plan, start, console, parts=parts)


def resume_run(
    folder: Path, console: Console, *, run_id: str | None = None, overrides: Sequence[str] = ()
) -> RunReport:
    """Continue an unfinished run from its saved specification.

    Args:
        overrides: `path=value` changes for the rest of the run; noted as the event `configuration_changed`, and in
            every later manifest by its configuration hash. What the run is fed with cannot change.

    Raises:
        UsageError: no such store or run, the run is finished, or its name would change.
    """
    if not folder.exists():
        raise UsageError(f"{folder} does not exist: give the folder of a store, for example runs/demo")
    with open_store(folder, create=False) as store:
        chosen = unfinished_run(store, folder, run_id)
        if store.cursor(RunCursors(chosen).finished):
            raise UsageError(f"run {chosen!r} is finished; `buffer-engine run` starts another")
    # The folder may have been moved since: the store it lies in is the one meant.
    place = f"store.path={json.dumps(str(folder))}"
    before = load_spec(specification_path(folder, chosen), overrides=(place,))
    loaded = load_spec(specification_path(folder, chosen), overrides=(place, *overrides))
    if loaded.spec.name != before.spec.name:
        raise UsageError("--set name=… would make another run; start it with `buffer-engine run`")
    changes = "; ".join(overrides) if loaded.config_hash != before.config_hash else ""
    return _run(build_plan(loaded), RunStart(chosen, continues=True), console, parts=ALL_PARTS, changes=changes)


def _run(plan: Plan, start: RunStart, console: Console, *, parts: Collection[Part], changes: str = "") -> RunReport:
    for warning in plan.warnings:
        console.print(f"warning: {warning.render(plan.file)}", highlight=False, markup=False, soft_wrap=True)
    folder = Path(reveal(plan.spec.store).path)
    store = open_run_store(plan.spec)
    assembly = None
    try:
        with store.open_run(start.run_id):
            console.print(f"run {start.run_id} in {folder}: {start.reason}", highlight=False, soft_wrap=True)
            console.print(
                f"watch it with: buffer-engine sql {folder} --name learning_curve", highlight=False, soft_wrap=True
            )
            save_specification(folder, start.run_id, resolved_yaml(plan.spec), plan.config_hash)
            if not start.continues:
                store.append_all({}, cursors={RunCursors(start.run_id).started: 1})
            if changes:
                store.append("events", event_row(start.run_id, None, "configuration_changed", 1, changes))
            assembly = assemble(plan, store, run_id=start.run_id, parts=parts)
            section = plan.spec.store
            trainer: Any = plan.spec.trainer
            max_uses: int = 1 if trainer is None else trainer.read.max_uses
            with (
                MetricWriter(store, start.run_id, folder, tensorboard=plan.spec.report.tensorboard) as writer,
                Housekeeper(
                    store, folder, start.run_id, compact=section.compact, retain=section.retain, max_uses=max_uses
                ) as housekeeper,
            ):
                loop = Loop(assembly, writer, Progress(console), parts=parts, after_step=housekeeper.after_step)
                outcome = loop.run()
    finally:
        if assembly is not None:
            assembly.close()
        else:
            store.close()
    return RunReport(start.run_id, folder, start.continues, outcome)
