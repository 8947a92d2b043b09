"""The two streams of the command line: results on stdout, everything else on stderr."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from buffer_engine.errors import BufferEngineError, ConfigError, Problem
from pipelines.incomplete import SpecificationError

results = Console(highlight=False)
"""What was asked for; a pipe gets this and nothing else."""

logs = Console(stderr=True, highlight=False)
"""Progress, warnings and errors."""


def print_text(text: str) -> None:
    """A result as plain text, neither wrapped nor coloured."""
    results.print(text, markup=False, soft_wrap=True)


def print_error(error: BufferEngineError) -> None:
    """An error for a person: its sentence, or one line a problem and their number."""
    if isinstance(error, ConfigError):
        print_problems(error.problems, file=error.file)
        if len(error.problems) > 1:
            where = f" in {error.file}" if error.file is not None else ""
            logs.print(Text(f"{len(error.problems)} problems{where}", style="bold"), soft_wrap=True)
        if isinstance(error, SpecificationError) and error.unchecked:
            logs.print(Text(f"not checked yet: {error.unchecked}"), soft_wrap=True)
        return
    logs.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)


def print_problems(problems: Iterable[Problem], *, file: Path | None, kind: str = "error") -> None:
    """One line a problem: `file:line: path: message → fix`."""
    for problem in problems:
        head = Text(f"{kind}: ", style="bold red" if kind == "error" else "bold yellow")
        logs.print(head + Text(problem.render(file)), soft_wrap=True)


@contextmanager
def resumable(store: Path) -> Generator[None]:
    """While a run works on `store`: Ctrl-C says how to go on with it."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if (store / "specs").is_dir():  # otherwise nothing was begun
            stop.add_note(f"continue with `buffer-engine resume {store}`")
        raise
