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
        follows: the finished run of the same name after which it starts.
    """

    run_id: str
    continues: bool
    follows: str | None = None

    @property
    def reason(self) -> str:
        """Why this run, for the person who asked for one."""
        if self.continues:
            return "continuing"
        return "a new run" if self.follows is None else f"a new run, because {self.follows} is finished"


def choose_run(store: ExperienceStore, folder: Path, name: str, config_hash: str, *, whole: bool = True) -> RunStart:
    """The stated rule: an unfinished run of this name and configuration is continued; after a finished one a new run
    with the next number starts in the same store; an unfinished run of another configuration is an error, unless it
    ended before its first row (a wrong path, say): then it is begun again.

    Args:
        whole: whether all stages are asked for; a single stage (`--only`) also goes on in a finished run of the same
            configuration.

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
            if saved_hash(folder, run_id) is None and _stored_hash(store, run_id) == config_hash:
                # The saved specification is gone, but the store knows that this is the one.
                return RunStart(run_id, continues=True)
            raise UsageError(
                f"run {run_id!r} in {folder} is unfinished and was started from another configuration. "
                f"Continue it with `buffer-engine resume {folder} --run {run_id}` (with `--set` to change something), "
                "or give this one another `name:`"
            )
        if not whole and saved_hash(folder, run_id) == config_hash:
            return RunStart(run_id, continues=True)
        number += 1
        run_id = f"{name}-{number}"
    before = None if number == 1 else name if number == 2 else f"{name}-{number - 1}"
    return RunStart(run_id, continues=False, follows=before)


def _is_empty(store: ExperienceStore, run_id: str) -> bool:
    """Whether a run left neither rows nor weights, so that nothing says under which configuration it began."""
    versions = store.table("models", columns=["run_id"]).column("run_id")
    return store.rollout_state(run_id=run_id).num_rows == 0 and run_id not in versions.to_pylist()


def _stored_hash(store: ExperienceStore, run_id: str) -> str | None:
    """Configuration hash in the run's newest row of `models`; None when it has none."""
    models = store.table("models", columns=["run_id", "config_hash"]).to_pylist()
    hashes = [row["config_hash"] for row in models if row["run_id"] == run_id]
    return hashes[-1] if hashes else None


def save_specification(folder: Path, run_id: str, resolved: str, config_hash: str) -> Path:
    """Write the resolved specification of a run; secrets are in it as `${env:NAME}` only.

    An older one of another configuration is kept beside it, named with its hash.
    """
    path = specification_path(folder, run_id)
    before = saved_hash(folder, run_id)
    if before == config_hash:
        return path
    with explained(path, "save the specification of the run"):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with open(partial, "w", encoding="utf-8") as file:
            file.write(f"# configuration hash: {config_hash}\n{resolved}")
            file.flush()
            os.fsync(file.fileno())
        if before is not None:
            os.replace(path, path.with_name(f"{run_id}.{before[:12]}.yaml.old"))
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
