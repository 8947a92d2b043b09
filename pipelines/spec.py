"""The specification: everything a person may write in a pipeline's YAML, one model per section.

Sections say what a run is made of; sections left out are stages left out (no `trainer`: curate only; no `explorer` but
`imports`: offline). Whether names refer to something and columns exist is the plan's matter, not decided here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny

from buffer_engine.config import ComponentConfig, component
from buffer_engine.store.base import Durability, OnInvalid
from buffer_engine.store.pressure import BackPressure
from explorers.base import Sampling
from explorers.config import ExplorerConfig
from explorers.importing import DialogueImport
from explorers.registry import MODELS, TASKSETS
from operators.registry import OPERATORS
from pipelines.housekeeping import CompactSection, RetainSection
from trainers.registry import TRAINERS

NAME_PATTERN = r"^[A-Za-z0-9_.-]+$"

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Reference = Annotated[str, Field(min_length=1)]
ModelEntry = Annotated[SerializeAsAny[ComponentConfig], component(MODELS)]
TaskSetEntry = Annotated[SerializeAsAny[ComponentConfig], component(TASKSETS)]
OperatorEntry = Annotated[SerializeAsAny[ComponentConfig], component(OPERATORS)]
TrainerEntry = Annotated[SerializeAsAny[ComponentConfig], component(TRAINERS)]


class StoreSection(ComponentConfig):
    """Where the tables of the run are kept."""

    path: Path = Field(
        description="folder of the store, of a shared one this machine's side of it; made when the run starts"
    )
    durability: Durability = Field(
        default="process",
        description="what an acknowledged row survives: `process` a killed process, `power` a power cut too",
    )
    catalog: str | None = Field(
        default=None,
        description="postgresql://user@host:port/database?schema=NAME, for a store that machines share; null: a file "
        "in the folder",
    )
    segments: str | None = Field(
        default=None,
        description="s3://bucket/prefix?endpoint_override=host:port&scheme=http&region=NAME; null: in the folder",
    )
    compact: CompactSection | None = Field(
        default=None, description="rows that training wants no more become Parquet during the run; null: they stay"
    )
    retain: tuple[RetainSection, ...] = Field(
        default=(), description="rules by which payload is erased during the run; needs `compact`"
    )
    on_invalid: OnInvalid = Field(
        default="refuse_all",
        description="a bad row from explorer or import: stop the run (`refuse_all`), or leave the row out and count it "
        "in `events` (`refuse_rows`)",
    )
    max_waiting_rows: int | None = Field(
        default=None, gt=0, description="rollouts of the run that may wait to be trained; null: unbounded"
    )
    wait_seconds: float = Field(
        default=600.0, ge=0, description="longest wait for room below max_waiting_rows; then the run stops"
    )

    @property
    def back_pressure(self) -> BackPressure | None:
        """The bound on waiting rollouts; None: there is none."""
        if self.max_waiting_rows is None:
            return None
        return BackPressure(rows=self.max_waiting_rows, seconds=self.wait_seconds)


class ImportSection(DialogueImport):
    """Offline data: a file of dialogues that becomes rollouts."""

    model: Reference = Field(description="name under `models` whose tokenizer and chat template make the token ids")


class EvaluateSampling(ComponentConfig):
    """How replies are drawn in evaluation: greedy, and otherwise as the explorer draws, unless said here."""

    temperature: float | None = Field(default=0.0, ge=0, description="0 is greedy; null: as the explorer")
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="share of probability drawn from; null: as the explorer"
    )
    top_k: int | None = Field(default=None, ge=0, description="0: off; null: as the explorer")
    max_tokens: int | None = Field(default=None, gt=0, description="most new tokens per reply; null: as the explorer")
    stop: tuple[str, ...] | None = Field(default=None, description="strings that end a reply; null: as the explorer")

    def over(self, exploring: Sampling) -> Sampling:
        """The sampling in use when the explorer samples with `exploring`."""
        given = {name: value for name, value in self.model_dump().items() if value is not None}
        return Sampling.model_validate(exploring.model_dump() | given)


class EvaluateSection(ComponentConfig):
    """Measuring the model on tasks it never trains on."""

    tasks: Reference = Field(description="name under `tasks`; its partition must be `eval`")
    every_steps: int = Field(
        default=10, gt=0, description="optimizer steps between two evaluations; also done first and last"
    )
    samples_per_task: int = Field(default=1, gt=0, description="attempts at each task")
    sampling: EvaluateSampling = Field(default=EvaluateSampling(), description="how replies are drawn")
    solved: str | None = Field(
        default=None, description="component that is 1 for a solved task; null: the weighted reward decides"
    )
    limit: int | None = Field(default=None, gt=0, description="only the first so many tasks; null: all")


class LoopSection(ComponentConfig):
    """How explore, curate and train follow each other."""

    mode: Literal["sync", "async"] = Field(default="sync", description="`sync`: one stage after the other")
    steps: int = Field(default=1, gt=0, description="optimizer steps (without a trainer: rounds of explore and curate)")
    publish_every: int = Field(
        default=1, gt=0, description="optimizer steps between two weight versions given to the explorer"
    )
    max_refills: int = Field(
        default=3, ge=0, description="further explorations when operators left too few rows for a batch"
    )
    on_starved: Literal["error", "skip"] = Field(
        default="error", description="still too few rows after the refills: stop with the counts, or skip the step"
    )
    evaluate: EvaluateSection | None = Field(default=None, description="evaluation during the run; null: none")


class ReportSection(ComponentConfig):
    """What a run leaves behind for the eye besides the tables."""

    plot: Path | None = Field(default=None, description="PNG of the reward curve; null: none")
    tensorboard: bool = Field(default=False, description="also write metrics as TensorBoard events")


class Spec(ComponentConfig):
    """A whole specification."""

    version: Literal[1] = Field(description="version of this file format")
    name: Name = Field(description="name of the run: letters, digits, `_`, `.` and `-`")
    seed: int = Field(default=0, ge=0, lt=2**63, description="every random choice of the run derives from it")
    store: StoreSection = Field(description="where the tables are kept")
    models: dict[Name, ModelEntry] = Field(default_factory=dict, description="models by name")
    tasks: dict[Name, TaskSetEntry] = Field(default_factory=dict, description="task sets by name")
    imports: dict[Name, ImportSection] = Field(default_factory=dict, description="offline data by name")
    explorer: ExplorerConfig | None = Field(
        default=None, description="who plays tasks and how; null: nothing is explored"
    )
    operators: tuple[OperatorEntry, ...] = Field(default=(), description="applied top to bottom to every rollout")
    trainer: TrainerEntry | None = Field(default=None, description="what trains which model; null: nothing is trained")
    loop: LoopSection = Field(default=LoopSection(), description="how the stages follow each other")
    report: ReportSection = Field(default=ReportSection(), description="plots and TensorBoard")
