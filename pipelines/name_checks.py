"""Checks of names between sections: what is referred to is declared, and of the partition that is wanted there."""

from __future__ import annotations

from buffer_engine.errors import did_you_mean
from pipelines.findings import Findings
from pipelines.spec import Spec
from pipelines.yaml_text import PathParts


def check_names(spec: Spec, found: Findings) -> None:
    """Every name that is used must be declared; what is declared should be used."""
    references: list[tuple[PathParts, str, str]] = []
    if spec.explorer is not None:
        references.append((("explorer", "model"), "models", spec.explorer.model))
        references.append((("explorer", "tasks"), "tasks", spec.explorer.tasks))
    trained = getattr(spec.trainer, "model", None)
    if isinstance(trained, str):
        references.append((("trainer", "model"), "models", trained))
    if spec.loop.evaluate is not None:
        references.append((("loop", "evaluate", "tasks"), "tasks", spec.loop.evaluate.tasks))
    references += [(("imports", name, "model"), "models", source.model) for name, source in spec.imports.items()]
    kinds = {"models": "model", "tasks": "task set"}
    for path, section, name in references:
        declared = found.draft.names(section)
        if name not in declared:
            fix = did_you_mean(name, declared) if declared else f"declare it under `{section}:`"
            found.problem(path, f"there is no {kinds[section]} {name!r} under `{section}`", fix)
    if found.draft.problems:
        return  # a reference may stand in a part that is wrong
    for section, entries in (("models", spec.models), ("tasks", spec.tasks)):
        used = {name for _, where, name in references if where == section}
        for name in entries:
            if name not in used:
                found.warn(
                    (section, name), f"{kinds[section]} {name!r} is not used by any section", "remove it, or use it"
                )


def check_partitions(spec: Spec, found: Findings) -> None:
    """Training plays `train`, evaluation plays `eval`; the two never mix."""
    uses: list[tuple[PathParts, str, str, str]] = []
    if spec.explorer is not None:
        uses.append((("explorer", "tasks"), spec.explorer.tasks, "train", "exploration makes training rows"))
    if spec.loop.evaluate is not None:
        uses.append((("loop", "evaluate", "tasks"), spec.loop.evaluate.tasks, "eval", "evaluation measures"))
    for path, name, wanted, why in uses:
        partition = getattr(spec.tasks.get(name), "partition", wanted)
        if partition == wanted:
            continue
        line = found.draft.document.lines.get(f"tasks.{name}")
        where = f" (line {line})" if line is not None else ""
        others = [other for other, config in spec.tasks.items() if getattr(config, "partition", None) == wanted]
        fix = f"use {others[0]!r}" if others else f"declare a task set with `partition: {wanted}` and use it here"
        found.problem(path, f"{why}, but task set {name!r}{where} is of partition {partition!r}, not {wanted!r}", fix)
