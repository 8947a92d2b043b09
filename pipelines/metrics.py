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


def metric_rows(run_id: str, numbers: Mapping[int, Mapping[str, float | None]]) -> pa.Table:
    """Rows of `metrics` from step → name → value; a number that is not finite becomes null, which means undefined."""
    flat = [(step, name, _finite(value)) for step, values in numbers.items() for name, value in values.items()]
    return pa.table(
        {
            "run_id": [run_id] * len(flat),
            "step": [step for step, _, _ in flat],
            "name": [name for _, name, _ in flat],
            "value": pa.array([value for _, _, value in flat], pa.float64()),
            "recorded_at": [now()] * len(flat),
        },
        schema=METRICS.schema,
    )


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


class MetricWriter:
    """Writes numbers of a step everywhere a person looks for them.

    The store's table is the truth. Numbers that describe rows are stored in the transaction that stores the rows, and
    only mirrored here; the JSONL file and the TensorBoard log are for following along, so a resumed run may repeat or
    miss a line there.
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
        with explained(self._path, "write metrics"):
            self._lines.close()
        if self._board is not None:
            self._board.close()

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Store `values` of `step` and mirror them."""
        if values:
            self._store.append("metrics", metric_rows(self._run_id, {step: values}))
            self.mirror(step, values)

    def mirror(self, step: int, values: Mapping[str, float | None]) -> None:
        """Write values that are already stored to the JSONL file and TensorBoard."""
        clean = {name: _finite(value) for name, value in values.items()}
        with explained(self._path, "write metrics"):
            self._lines.write(json.dumps({"step": step, "time": now().isoformat(), **clean}) + "\n")
            self._lines.flush()
        if self._board is not None:
            for name, value in clean.items():
                if value is not None:
                    self._board.add_scalar(name, value, step)
