"""Checks of numbers that must fit each other: groups and batches, periods and the length of the run."""

from __future__ import annotations

from buffer_engine.store.base import ReadPolicy
from pipelines.findings import Findings, counted, written_at
from pipelines.read_checks import check_read
from pipelines.spec import Spec
from pipelines.yaml_text import PathParts

_BATCHES = "whether groups, batches and periods fit"


def check_sizes(spec: Spec, found: Findings) -> None:
    """Sizes and periods that must fit each other."""
    loop, explorer = spec.loop, spec.explorer
    read = getattr(spec.trainer, "read", None)
    if spec.trainer is None:
        found.skip(_BATCHES, found.unsound("trainer"))
    if isinstance(read, ReadPolicy) and _sound(found, "trainer.read", "loop.publish_every"):
        _batch(spec, read, found)
        check_read(spec, read, found)
        if read.max_staleness is not None and explorer is not None and loop.publish_every - 1 > read.max_staleness:
            found.problem(
                ("loop", "publish_every"),
                f"rows get up to {loop.publish_every - 1} weight versions old before new weights are published, and "
                f"trainer.read.max_staleness is {read.max_staleness}",
                f"publish at least every {counted(read.max_staleness + 1, 'step')}, or allow more staleness",
            )
    _waiting(spec, read, found)
    checkpoint = getattr(spec.trainer, "checkpoint", None)
    if (
        checkpoint is not None
        and explorer is not None
        and _sound(found, "trainer.checkpoint", "loop.publish_every")
        and checkpoint.every_steps % loop.publish_every
    ):
        every = counted(checkpoint.every_steps, "step")
        found.problem(
            ("trainer", "checkpoint", "every_steps"),
            f"checkpoints every {every} fall between publications every {loop.publish_every}: a resumed "
            "run would explore with other weights than the uninterrupted one",
            f"write a multiple of {loop.publish_every}",
        )
    _periods(spec, found)


def _waiting(spec: Spec, read: object, found: Findings) -> None:
    """A loop that explores and trains in turn must have room for what it explores before it trains."""
    bound, explorer, loop = spec.store.max_waiting_rows, spec.explorer, spec.loop
    if bound is None:
        return
    at: PathParts = ("store", "max_waiting_rows")
    if spec.trainer is None and found.sound("trainer"):
        found.warn(at, "nothing is trained, so rows wait for ever and the bound stops the run", "remove it")
    if spec.imports and found.sound("imports"):
        found.warn(at, "imported rows wait too, and all are imported before the first step", "allow for them")
    if explorer is None or not found.sound("explorer.group_size", "explorer.tasks_per_step", "store.max_waiting_rows"):
        return
    made = explorer.group_size * explorer.tasks_per_step
    if bound < made:
        found.problem(
            at,
            f"one exploration makes {made} rows, and the loop trains only after it: with a bound of {bound} it would "
            "wait for itself",
            f"write {made} or more",
        )
        return
    most = made * (1 + loop.max_refills)
    if isinstance(read, ReadPolicy) and found.sound("trainer.read") and bound < most + read.rows:
        found.warn(
            at,
            f"{counted(1 + loop.max_refills, 'exploration')} of {made} rows and what a batch of {read.rows} left over "
            f"may wait at once: {most + read.rows} rows, more than {bound}",
            f"write {most + read.rows}, or fewer loop.max_refills",
        )


def _periods(spec: Spec, found: Findings) -> None:
    """Periods that never come round; only those that a person chose, a default is nobody's mistake."""
    checkpoint, stats = (getattr(spec.trainer, name, None) for name in ("checkpoint", "token_stats"))
    evaluate = spec.loop.evaluate
    periods: tuple[tuple[tuple[str, ...], int | None], ...] = (
        (("trainer", "checkpoint", "every_steps"), getattr(checkpoint, "every_steps", None)),
        (("trainer", "token_stats", "every_steps"), getattr(stats, "every_steps", None)),
        (("loop", "evaluate", "every_steps"), evaluate.every_steps if evaluate is not None else None),
    )
    for path, every in periods:
        chosen = written_at(found.draft.data, *path) is not None and not found.draft.is_saved
        if chosen and every is not None and every > spec.loop.steps and found.sound("loop.steps"):
            steps = counted(spec.loop.steps, "step")
            found.warn(path, f"{every} is more than the {steps} of the run", f"write {spec.loop.steps} or less")


def _batch(spec: Spec, read: ReadPolicy, found: Findings) -> None:
    explorer = spec.explorer
    at: PathParts = ("trainer", "read", "rows")
    if read.min_rows > read.rows:
        found.problem(
            ("trainer", "read", "min_rows"), f"min_rows is {read.min_rows} and rows only {read.rows}", "lower min_rows"
        )
    if explorer is None:
        found.skip(_BATCHES, found.unsound("explorer"))
        return
    if not _sound(found, "explorer.group_size", "explorer.tasks_per_step"):
        return
    size, rows = explorer.group_size, read.rows
    if rows < size:
        found.problem(
            at, f"a group of {size} rows never fits a batch of {rows}", f"write {size} or more, or make groups smaller"
        )
    elif rows % size:
        whole = rows // size * size
        found.warn(
            at,
            f"groups have {size} rows, so a batch of at most {rows} holds {whole}",
            f"write {whole} or {whole + size}",
        )
    made = size * explorer.tasks_per_step
    if size <= rows and made < rows:
        found.warn(
            ("explorer", "tasks_per_step"),
            f"one exploration makes {made} rows and a batch holds {rows}: every step starts with several explorations, "
            "or trains smaller batches",
            f"write {-(-rows // size)} for one exploration a batch",
        )


def _sound(found: Findings, *paths: str) -> bool:
    """`Findings.sound`, noting what is not judged because of it."""
    wrong = found.unsound(*paths)
    found.skip(_BATCHES, wrong)
    return not wrong
