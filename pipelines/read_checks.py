"""Checks of the read policy against the rest of the file: whether there will be rows of the kinds that it asks for."""

from __future__ import annotations

from buffer_engine.errors import did_you_mean
from buffer_engine.store.base import ReadPolicy
from operators.base import OperatorConfig
from pipelines.findings import Findings
from pipelines.spec import Spec


def check_read(spec: Spec, read: ReadPolicy, found: Findings) -> None:
    """What a read policy needs from explorer, imports and operators."""
    _mixture(spec, read, found)
    _priority(spec, read, found)
    _limits(spec, read, found)
    if read.type == "stratified" and read.by == "taskset" and not spec.imports and found.sound("imports"):
        found.warn(
            ("trainer", "read", "by"),
            "the explorer plays one task set and nothing is imported: there is one part, which gets the whole batch",
            "write `by: task`, or import rows",
        )


def _mixture(spec: Spec, read: ReadPolicy, found: Findings) -> None:
    if read.type != "mixture" or not found.sound("imports", "explorer"):
        return
    at = ("trainer", "read", "expert_share")
    if not spec.imports:
        found.problem(at, "expert rows are imported rows, and nothing is imported", "add `imports:`, or remove it")
    if spec.explorer is None:
        found.problem(at, "a mixture needs rollouts too, and there is no explorer", "add `explorer:`, or remove it")
        return
    places, size = read.rows - read.expert_rows, spec.explorer.group_size
    if size <= read.rows and places < size:
        found.problem(
            at,
            f"{read.expert_rows} of {read.rows} rows are for experts: a group of {size} rows never fits the other "
            f"{places}",
            "write a smaller share or more rows",
        )


def _priority(spec: Spec, read: ReadPolicy, found: Findings) -> None:
    if read.type != "prioritized" or read.by is None:
        return
    at = ("trainer", "read", "by")
    if read.by == "advantage" and read.max_uses == 1:
        found.problem(
            at,
            "a row has an advantage once it was trained, and max_uses is 1: every row looks alike",
            "write `max_uses` above 1",
        )
    name = read.by.removeprefix("score:")
    if read.by.startswith("score:") and found.sound("operators"):
        ids = [config.name for config in spec.operators if isinstance(config, OperatorConfig)]
        if name not in ids:
            found.warn(
                at,
                f"no operator is called {name!r}: rows count as `unseen` until somebody else gives them this score",
                did_you_mean(name, ids),
            )


def _limits(spec: Spec, read: ReadPolicy, found: Findings) -> None:
    if read.samples_per_insert is not None and read.samples_per_insert >= read.max_uses and read.min_size == 1:
        found.warn(
            ("trainer", "read", "samples_per_insert"),
            f"a row trains at most {read.max_uses} times, so {read.samples_per_insert:g} uses per row is no limit",
            "write less, or remove it",
        )
    explorer = spec.explorer
    if explorer is None or read.max_tokens is None or not found.sound("explorer.group_size", "explorer.sampling"):
        return
    longest = explorer.group_size * explorer.sampling.max_tokens
    if longest > read.max_tokens:
        found.warn(
            ("trainer", "read", "max_tokens"),
            f"a group of {explorer.group_size} replies of {explorer.sampling.max_tokens} tokens has {longest}, prompts "
            f"not counted, and a batch takes {read.max_tokens}: such a group stops the run",
            f"write {longest} and the prompts, or more",
        )
