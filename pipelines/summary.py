"""What a specification will do, in a screenful for a person."""

from __future__ import annotations

from typing import Any

from operators.plan import OperatorPlan, PlannedOperator
from pipelines.findings import as_written, counted
from pipelines.spec import Spec


def summarise(spec: Spec, operators: OperatorPlan) -> str:
    """Stages, models, tasks, operators with what they read and write, and what is trained."""
    stages = [
        *(["import"] if spec.imports else []),
        *(["explore"] if spec.explorer is not None else []),
        "curate",
        *(["train"] if spec.trainer is not None else []),
    ]
    steps = counted(spec.loop.steps, "step")
    rows: list[tuple[str, str]] = [(spec.name, f"{' → '.join(stages)}, {steps}, store {spec.store.path}")]
    rows += _entries("models", [_named(name, model) for name, model in spec.models.items()])
    rows += _entries("tasks", [_named(name, tasks) for name, tasks in spec.tasks.items()])
    rows += _entries("imports", [f"{name}: {source.path} ({source.format})" for name, source in spec.imports.items()])
    if spec.explorer is not None:
        explorer: Any = spec.explorer
        rows.append(
            (
                "explorer",
                f"{explorer.model} plays {explorer.tasks} ({explorer.workflow.type}): "
                f"{counted(explorer.tasks_per_step, 'task')} × {counted(explorer.group_size, 'sample')}",
            )
        )
    rows += _entries("operators", [_operator(step) for step in operators.steps])
    if spec.trainer is not None:
        rows.append(("trainer", _trainer(spec.trainer)))
    if spec.loop.evaluate is not None:
        every = spec.loop.evaluate.every_steps
        rows.append(("evaluate", f"{spec.loop.evaluate.tasks} every {'step' if every == 1 else f'{every} steps'}"))
    width = max(len(title) for title, _ in rows)
    return "\n".join(f"{title.ljust(width)}  {text}" for title, text in rows)


def _entries(title: str, texts: list[str]) -> list[tuple[str, str]]:
    return [(title if index == 0 else "", text) for index, text in enumerate(texts)]


def _named(name: str, config: Any) -> str:
    details = [
        str(value) for key in ("path", "dataset", "partition") if (value := getattr(config, key, None)) is not None
    ]
    return f"{name}: {' '.join([config.type, *details])}"


def _operator(step: PlannedOperator) -> str:
    contract = step.contract
    reads = ", ".join(sorted(contract.reads)) or "nothing"
    effects: list[str] = []
    if contract.scores:
        effects.append(
            "metric"
            if step.weight == 0
            else f"scores with weight {as_written(step.weight)}"
            if step.weight
            else "scores"
        )
    if contract.writes:
        effects.append(f"writes {', '.join(contract.writes)}")
    effects += [door for door in ("drops", "holds", "masks", "adds") if getattr(contract, door)]
    kind = "" if step.id == step.type else f" ({step.type})"
    return f"#{step.position} {step.id}{kind}: reads {reads}; {', '.join(effects) or 'changes nothing'}"


def _trainer(config: Any) -> str:
    algorithm = getattr(config, "algorithm", None)
    parts = [config.type]
    if getattr(config, "model", None):
        parts.append(f"trains {config.model}")
    if algorithm is not None:
        advantage = getattr(algorithm, "advantage", None)
        parts.append(f"with {algorithm.type}" + (f" ({advantage.type} advantage)" if advantage is not None else ""))
    read = getattr(config, "read", None)
    if read is not None:
        parts.append(f"on batches of at most {counted(read.rows, 'row')}")
    return " ".join(parts)
