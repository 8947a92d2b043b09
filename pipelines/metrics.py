"""Metric sinks: the store's table, a JSONL file and TensorBoard, fed together."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import pyarrow as pa

from buffer_engine.extras import require
from buffer_engine.schema import METRICS
from buffer_engine.store.base import ExperienceStore
from buffer_engine.store.faults import explained
from pipelines.clock import now


class MetricWriter:
    """Writes numbers of a step everywhere a person looks for them.

    The store's table comes first and is the truth; the JSONL file and the TensorBoard log are for following along, so
    a resumed run may repeat a line there.
    """

    def __init__(self, store: ExperienceStore, run_id: str, folder: Path, *, tensorboard: bool) -> None:
        self._store = store
        self._run_id = run_id
        self._path = folder / "metrics" / f"{run_id}.jsonl"
        with explained(self._path, "write metrics"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lines: IO[str] = self._path.open("a", encoding="utf-8")
        self._board: Any = None
        if tensorboard:
            board = require("torch.utils.tensorboard", "torch")
            self._board = board.SummaryWriter(log_dir=str(folder / "tensorboard" / run_id))

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()
        if self._board is not None:
            self._board.close()

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Store `values` of `step`; a number that is not finite is stored as null, which means undefined."""
        if not values:
            return
        clean = {
            name: None if value is None or not math.isfinite(value) else float(value) for name, value in values.items()
        }
        stamp = now()
        table = pa.table(
            {
                "run_id": [self._run_id] * len(clean),
                "step": [step] * len(clean),
                "name": list(clean),
                "value": list(clean.values()),
                "recorded_at": [stamp] * len(clean),
            },
            schema=METRICS.schema,
        )
        self._store.append("metrics", table)
        with explained(self._path, "write metrics"):
            self._lines.write(json.dumps({"step": step, "time": stamp.isoformat(), **clean}) + "\n")
            self._lines.flush()
        if self._board is not None:
            for name, value in clean.items():
                if value is not None:
                    self._board.add_scalar(name, value, step)
