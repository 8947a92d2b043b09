"""Checks of what lies on disk: files of tasks and imports and their columns, model folders, the store's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffer_engine.errors import BufferEngineError, TasksetError
from explorers.models.weights_cache import PACKAGED, check_folder
from explorers.registry import TASKSETS
from explorers.tasksets.base import Split
from explorers.tasksets.row_source import jsonl_columns, parquet_columns
from pipelines.findings import Findings, written_at
from pipelines.secrets import reveal
from pipelines.spec import Spec


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns that tasks and imports bring beside those of the frame.

    Attributes:
        by_taskset: task set → info key → Polars type name; a set whose columns nobody knows is left out.
        imported: the same of imported files together.
        unknown: places of the problems because of which columns may be missing here; empty: all are known.
    """

    by_taskset: Mapping[str, Mapping[str, str]]
    imported: Mapping[str, str]
    unknown: tuple[str, ...]


def source_columns(spec: Spec, found: Findings) -> Columns:
    """Columns of the task sets that the run plays and of its imports; what cannot be read is a problem.

    When the sections that choose task sets are wrong, all that are declared are looked at.
    """
    data = found.draft.data
    chosen = [written_at(data, "explorer", "tasks"), written_at(data, "loop", "evaluate", "tasks")]
    played = [name for name in chosen if isinstance(name, str)]
    unknown: list[str] = []
    if not isinstance(chosen[0], str):
        unknown += found.unsound("explorer")
    if not found.sound("explorer.tasks", "loop.evaluate.tasks"):
        played += list(spec.tasks)
    columns: dict[str, dict[str, str]] = {}
    for name in dict.fromkeys(played):
        config: Any = spec.tasks.get(name)
        if config is None:
            unknown += found.unsound(f"tasks.{name}") or found.unsound("tasks") or ["explorer.tasks"]
            continue
        try:
            columns[name] = dict(TASKSETS.load(config.type)(reveal(config)).columns())
        except BufferEngineError as error:
            found.error(("tasks", name), error)
            unknown.append(f"tasks.{name}")
    imported = _import_columns(spec, found, unknown)
    return Columns(columns, imported, tuple(dict.fromkeys(unknown)))


def _import_columns(spec: Spec, found: Findings, unknown: list[str]) -> dict[str, str]:
    """Columns of imported files that are not the dialogue itself; `unknown` gets the imports that do not tell."""
    columns: dict[str, str] = {}
    for name in found.draft.names("imports"):
        if name not in spec.imports:
            unknown.append(f"imports.{name}")
    unknown += found.unsound("imports") if not found.draft.names("imports") else []
    for name, source in spec.imports.items():
        path = Path(source.path).expanduser()
        try:
            if not path.is_file():
                raise TasksetError(f"there is no file {path} → paths start at the current folder")
            kinds = parquet_columns(path) if path.suffix == ".parquet" else jsonl_columns(path, skip_bad=True)
        except BufferEngineError as error:
            found.error(("imports", name, "path"), error)
            unknown.append(f"imports.{name}")
            continue
        dialogue = {source.messages, source.prompt, source.response, "messages", "conversations"}
        for column, kind in kinds.items():
            if column not in dialogue:
                columns.setdefault(column, kind)
    return columns


_SOURCE_KEYS = ("type", "path", "dataset", "config")
"""What makes two task sets read one source; seeds and sizes of generators only choose from it."""


def check_shared_sources(spec: Spec, found: Findings) -> None:
    """Task sets of both partitions over one source share prompts unless they take the two parts of one split."""
    explorer, evaluate = spec.explorer, spec.loop.evaluate
    if explorer is None or evaluate is None:
        return
    mine, other = spec.tasks.get(explorer.tasks), spec.tasks.get(evaluate.tasks)
    if mine is None or other is None or mine is other or not found.sound("tasks"):
        return
    if any(getattr(mine, key, None) != getattr(other, key, None) for key in _SOURCE_KEYS):
        return
    first, second = (getattr(config, "split", None) for config in (mine, other))
    why = "and no split keeps their prompts apart"
    if isinstance(first, Split) and isinstance(second, Split):
        if (first.share, first.seed) == (second.share, second.seed) and first.part != second.part:
            return
        why = "and their splits are not the two parts of one"
    found.warn(
        ("tasks", evaluate.tasks),
        f"task sets {explorer.tasks!r} and {evaluate.tasks!r} read the same source, {why}: a run refuses a prompt that "
        "is in both",
        "give both `split: {share: 0.2, part: …}`, one with `rest` and one with `held_out`",
    )


def check_models(spec: Spec, found: Findings) -> None:
    """Folders of models are there and whole; a packaged model is made when first used."""
    for name, config in spec.models.items():
        path = getattr(config, "path", None)
        if not isinstance(path, (str, Path)):
            continue
        try:
            shown = str(getattr(reveal(config), "path"))  # noqa: B009 - the field exists: it was just read
            if shown not in PACKAGED:
                check_folder(Path(shown).expanduser(), shown)
        except BufferEngineError as error:
            found.error(("models", name, "path"), error)
