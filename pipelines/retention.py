"""What retention means to runs: ages as people write them, rows that a resumed run trains again, rows that are gone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.errors import TrainingError
from buffer_engine.store.base import ExperienceStore
from pipelines.checkpoints import CheckpointFolder
from pipelines.cursors import RunCursors

_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_SHOWN = 5
AGE = "a number and a unit: 90s, 30m, 12h, 7d, 2w, or 500v for catalog versions"


def parse_age(text: str) -> tuple[float | None, int | None]:
    """Seconds or catalog versions, whichever `text` gives.

    Raises:
        ValueError: it is no age; the message says what one looks like.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdwv])", text)
    if found is None or (found[2] == "v" and "." in found[1]):
        raise ValueError(f"{text!r} is no age; write {AGE}")
    if found[2] == "v":
        return None, int(found[1])
    return float(found[1]) * _SECONDS[found[2]], None


def replayed_after(store: ExperienceStore, folder: Path) -> dict[str, int]:
    """For every run that may be resumed, the step that its oldest checkpoint stands after (0: it has none).

    Any of the checkpoints may turn out to be the newest that is sound, and later steps are trained again.
    """
    runs = set(store.table("batches", columns=["run_id"]).column("run_id").to_pylist())
    steps: dict[str, int] = {}
    for run_id in runs:
        if not store.cursor(RunCursors(run_id).finished):
            checkpoints = CheckpointFolder(folder, run_id, keep=1).newest_first()
            steps[run_id] = int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0
    return steps


def refuse_erased(store: ExperienceStore, experience_ids: Sequence[str], *, doing: str) -> None:
    """Raise when the payload of any of the rows was erased.

    Raises:
        TrainingError: names the rows, and when, by whom and why they were erased.
    """
    erased = store.table("erasures")
    found = erased.filter(pc.is_in(erased.column("experience_id"), value_set=pa.array(experience_ids, pa.string())))
    if found.num_rows == 0:
        return
    names: list[str] = found.column("experience_id").to_pylist()
    first = found.slice(0, 1).to_pylist()[0]
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    raise TrainingError(
        f"{doing}: the payload of {shown} was erased ({first['erased_at']:%Y-%m-%d %H:%M} UTC by {first['author']}: "
        f"{first['reason']}); what was recorded about the rows is still there, their tokens are not"
    )
