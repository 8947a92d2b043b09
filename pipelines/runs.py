"""Runs in a store: their saved specifications, and the rule by which `run` starts, continues or refuses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from buffer_engine.errors import UsageError
from buffer_engine.store.base import ExperienceStore
from buffer_engine.store.faults import explained
from pipelines.cursors import RunCursors


@dataclass(frozen=True, slots=True)
class RunStart:
    """The run to do next.

    Attributes:
        run_id: its name in the store.
        continues: whether it exists already and is not finished.
    """

    run_id: str
    continues: bool


def choose_run(store: ExperienceStore, folder: Path, name: str, config_hash: str) -> RunStart:
    """The stated rule: an unfinished run of this name and configuration is continued; after a finished one a new run
    with the next number starts in the same store; an unfinished run of another configuration is an error, unless it
    ended before its first row (a wrong path, say): then it is begun again.

    Raises:
        UsageError: the newest run of this name is unfinished and was started from another configuration.
    """
    number = 1
    run_id = name
    while store.cursor(RunCursors(run_id).started):
        if not store.cursor(RunCursors(run_id).finished):
            if saved_hash(folder, run_id) == config_hash:
                return RunStart(run_id, continues=True)
            if _is_empty(store, run_id):
                return RunStart(run_id, continues=False)
            raise UsageError(
                f"run {run_id!r} in {folder} is unfinished and was started from another configuration. "
                f"Continue it with `buffer-engine resume {folder} --run {run_id}`, or give this one another `name:`"
            )
        number += 1
        run_id = f"{name}-{number}"
    return RunStart(run_id, continues=False)


def _is_empty(store: ExperienceStore, run_id: str) -> bool:
    """Whether a run left neither rows nor weights, so that nothing says under which configuration it began."""
    versions = store.table("models", columns=["run_id"]).column("run_id")
    return store.rollout_state(run_id=run_id).num_rows == 0 and run_id not in versions.to_pylist()


def save_specification(folder: Path, run_id: str, resolved: str, config_hash: str) -> Path:
    """Write the resolved specification of a run, once; secrets are in it as `${env:NAME}` only."""
    path = specification_path(folder, run_id)
    with explained(path, "save the specification of the run"):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with open(partial, "w", encoding="utf-8") as file:
            file.write(f"# configuration hash: {config_hash}\n{resolved}")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    return path


def specification_path(folder: Path, run_id: str) -> Path:
    """Where the resolved specification of a run lies."""
    return folder / "specs" / f"{run_id}.yaml"


def saved_hash(folder: Path, run_id: str) -> str | None:
    """Configuration hash of a saved run; None when it has no saved specification."""
    path = specification_path(folder, run_id)
    if not path.exists():
        return None
    return path.read_text(encoding="utf-8").splitlines()[0].rpartition(": ")[2]


def unfinished_run(store: ExperienceStore, folder: Path, run_id: str | None) -> str:
    """The run that `resume` means.

    Raises:
        UsageError: there is none, there are several and none was named, or the named one is unknown.
    """
    known = sorted(path.stem for path in (folder / "specs").glob("*.yaml"))
    if run_id is not None:
        if run_id not in known:
            raise UsageError(f"{folder} has no run {run_id!r}; it has: {', '.join(known) or 'none'}")
        return run_id
    open_runs = [name for name in known if not store.cursor(RunCursors(name).finished)]
    if len(open_runs) == 1:
        return open_runs[0]
    if not open_runs:
        raise UsageError(f"{folder} has no unfinished run; runs there: {', '.join(known) or 'none'}")
    raise UsageError(f"{folder} has several unfinished runs ({', '.join(open_runs)}): name one with --run")
