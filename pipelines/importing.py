"""Imports as a resumable phase: offline dialogues become rollouts, part by part, each part with its cursor."""

from __future__ import annotations

from buffer_engine.errors import ConfigError
from explorers.importing import import_dialogues
from pipelines.assemble import Assembly
from pipelines.cursors import RunCursors
from pipelines.progress import Progress


def import_all(assembly: Assembly, progress: Progress) -> int:
    """Import every source of the specification that is not in the store yet; returns the number of new rows.

    Raises:
        TasksetError: a file is missing, empty or has bad rows (with line numbers).
    """
    cursors = RunCursors(assembly.run_id)
    store = assembly.store
    total = 0
    for name, source in assembly.spec.imports.items():
        if store.cursor(cursors.import_done(name)):
            continue
        if assembly.engine is None:
            raise ConfigError.one(f"import {name!r} needs a model to tokenise with", path=f"imports.{name}.model")
        stored = store.cursor(cursors.imported(name))
        with progress.phase(f"importing {name}", total=None) as advance:
            for index, part in enumerate(import_dialogues(source, engine=assembly.engine, run_id=assembly.run_id)):
                if index < stored:
                    continue
                tables = {"tasks": part.tasks, "rollouts": part.rollouts, "events": part.events}
                receipt = store.append_all(
                    {table: rows for table, rows in tables.items() if rows.num_rows},
                    cursors={cursors.imported(name): index + 1},
                    on_invalid=assembly.spec.store.on_invalid,
                )
                total += receipt.appended.get("rollouts", 0)
                advance(part.rollouts.num_rows)
        store.append_all({}, cursors={cursors.import_done(name): 1})
    return total
