"""What is known about Data-Juicer's operators without Data-Juicer: the table in `juicer_ops.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict
from ruamel.yaml import YAML

Effect = Literal["filter", "map"]

FILTER_ARGS = ("min_closed_interval", "max_closed_interval", "reversed_range")
"""Arguments that every filter takes."""

MANAGED_ARGS = (
    "text_key", "skip_op_error", "auto_op_parallelism", "num_proc", "batch_size", "batch_mode", "adaptive_batching",
    "accelerator", "turbo", "work_dir", "index_key", "stats_export_path", "cpu_required", "gpu_required",
    "mem_required", "num_cpus", "num_gpus", "memory", "runtime_env", "ray_execution_mode",
)  # fmt: skip
"""Arguments about how Data-Juicer's own executor runs an operator; here the engine does that."""


class JuicerOp(BaseModel):
    """One operator.

    Attributes:
        effect: a filter keeps or drops rows, a map changes texts.
        reads, writes: fields of a row as Data-Juicer names them; `fields` stands for those of the configuration.
        stats: the numbers that a filter computes.
        args: arguments of its own.
        needs: packages beside Data-Juicer.
        note: what surprises.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    effect: Effect
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    stats: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    note: str = ""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments that may be given."""
        return (*self.args, *(FILTER_ARGS if self.effect == "filter" else ()))


class JuicerTable(BaseModel):
    """The table and the release it was tested with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    release: str
    ops: Mapping[str, JuicerOp]


@cache
def juicer_table() -> JuicerTable:
    """The table that is shipped."""
    text = Path(__file__).with_name("juicer_ops.yaml").read_text(encoding="utf-8")
    return JuicerTable.model_validate(YAML(typ="safe", pure=True).load(text))
