"""Progress of a run for a person: bars on a terminal, one line a step elsewhere. Always on stderr."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

SHOWN = (
    ("explore/reward_mean", "reward"),
    ("explore/ended", "ended"),
    ("explore/response_tokens", "length"),
    ("curate/kept", "kept"),
    ("train/staleness_max", "staleness"),
    ("train/loss", "loss"),
    ("explore/tokens_per_second", "sampled tok/s"),
    ("train/tokens_per_second", "trained tok/s"),
)
"""Metrics in the line of a step, and what they are called there."""


class Progress:
    """One bar over the steps, one for the phase that runs, and a line of numbers after each step."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._numbers: dict[str, float] = {}
        self._live: RichProgress | None = None
        self._steps: TaskID | None = None
        self._total = 0

    @contextmanager
    def steps(self, *, total: int, start: int) -> Generator[None]:
        """Show the steps bar while the loop runs."""
        self._total = total
        if self._quiet or not self._console.is_terminal:
            yield
            return
        with _bars(self._console) as live:
            self._live = live
            self._steps = live.add_task("steps", total=total, completed=start)
            yield
        self._live = None

    @contextmanager
    def phase(self, title: str, *, total: int | None) -> Generator[Callable[[int], None]]:
        """Show one phase; the value is called with the number of rows done."""
        if self._quiet or not self._console.is_terminal:
            yield lambda rows: None
            return
        if self._live is not None:
            live = self._live
            task = live.add_task(title, total=total)
            try:
                yield lambda rows: live.advance(task, rows)
            finally:
                live.remove_task(task)
            return
        with _bars(self._console) as own:
            task = own.add_task(title, total=total)
            yield lambda rows: own.advance(task, rows)

    def say(self, sentence: str) -> None:
        """Tell the person something about the run that no number tells."""
        if not self._quiet:
            self._console.print(sentence, highlight=False, soft_wrap=True)

    def note(self, step: int, numbers: Mapping[str, float]) -> None:
        """Remember numbers for the step's line; an evaluation gets a line of its own at once."""
        self._numbers.update(numbers)
        found = {name.removeprefix("eval/"): value for name, value in numbers.items() if name.startswith("eval/")}
        if found and not self._quiet:
            taskset = next(iter(found)).partition("/")[0]
            short = {name.partition("/")[2]: value for name, value in found.items()}
            rest = [f"{name} {_shown(value)}" for name, value in short.items() if name not in ("solve_rate", "rows")]
            head = f"after step {step}, {taskset}: solve_rate {_shown(short.get('solve_rate', float('nan')))}"
            self.say(f"{head} of {short['rows']:.0f}  " + "  ".join(rest))

    def step_done(self, step: int, seconds: float) -> None:
        """Print the step's line and advance the bar."""
        if not self._quiet:
            parts = [f"{label} {_shown(self._numbers[name])}" for name, label in SHOWN if name in self._numbers]
            line = "  ".join((f"step {step}/{self._total}", *parts, f"{seconds:.1f} s"))
            self._console.print(line, highlight=False, soft_wrap=True)
        self._numbers.clear()
        if self._live is not None and self._steps is not None:
            self._live.update(self._steps, completed=step)


def _shown(value: float) -> str:
    """Three digits that matter, and never an exponent where a plain number will do."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _bars(console: Console) -> RichProgress:
    return RichProgress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        # A step can take minutes: the estimate looks back far enough to have seen several.
        speed_estimate_period=1800.0,
    )
