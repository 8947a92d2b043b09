"""The command `buffer-engine`: its verbs, and the one place where errors become exit codes.

To add a verb: write `pipelines/cli/<verb>.py` with a function whose parameters are annotated for typer (its docstring
is the help) or a `typer.Typer` for a verb with verbs of its own, and add a line to `VERBS`. The module is imported only
when the verb is used, so `buffer-engine --help` stays quick whatever the verbs import. Functions print through
`pipelines.cli.console`, raise errors of `buffer_engine.errors`, and never call `sys.exit`.

Exit codes: 0 done, 1 failed, 2 bad configuration or usage, 3 missing extra, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import takewhile
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from buffer_engine.errors import BufferEngineError, UsageError, did_you_mean
from pipelines.cli.console import logs, print_error, print_text
from pipelines.cli.shadowing import shadows

DEBUG_VARIABLE = "BUFFER_ENGINE_DEBUG"
INTERRUPTED = 130

# Threads that spin while they wait slow each other down by a factor of ten as soon as another process wants a core,
# a second terminal with a query for instance. The OpenMP library reads this once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@dataclass(frozen=True, slots=True)
class Verb:
    """One sub-command: where it lives (`module:attribute`) and its line in the list of commands."""

    target: str
    help: str

    @property
    def module(self) -> str:
        """The module to import."""
        return self.target.partition(":")[0]

    def load(self, name: str) -> Any:
        """The click command behind the verb; imports its module."""
        found = getattr(import_module(self.module), self.target.partition(":")[2])
        if isinstance(found, typer.Typer):
            command = typer.main.get_command(found)
        else:
            single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            single.command(name=name)(found)
            command = typer.main.get_command(single)
        command.name = name
        return command


VERBS: Mapping[str, Verb] = {
    "check": Verb("pipelines.cli.check:check", "Check a specification without running anything."),
    "run": Verb("pipelines.cli.run:run", "Run a specification, or continue its unfinished run."),
    "resume": Verb("pipelines.cli.resume:resume", "Continue an interrupted run of a store."),
    "curate": Verb("pipelines.cli.curate:curate", "Pass stored rollouts through the operators."),
    "report": Verb("pipelines.cli.report:report", "Print the report of a run."),
    "sql": Verb("pipelines.cli.sql:sql", "Ask SQL of a store, also while it is written."),
    "show": Verb("pipelines.cli.show:show", "Print one experience or group to read."),
    "explain": Verb("pipelines.cli.explain:explain", "Say what a training batch was made of."),
    "rebuild": Verb("pipelines.cli.rebuild:rebuild", "Give a training batch again, exactly as it was trained."),
    "what-if": Verb(
        "pipelines.cli.what_if:what_if", "Say what a batch would have been with other operators or scores."
    ),
    "score": Verb("pipelines.cli.score:score", "Add late scores, from a file or by an operator."),
    "store": Verb("pipelines.cli.store:store", "Verify, show, compact or erase what is in a store."),
    "bench": Verb("pipelines.cli.bench:bench", "Measure speed beside peers, in one run."),
    "operators": Verb("pipelines.cli.components:operators", "List operators and other components, or explain one."),
    "import-recipe": Verb(
        "pipelines.cli.import_recipe:import_recipe_file", "Turn a Data-Juicer recipe into an operators list."
    ),
    "schema": Verb("pipelines.cli.components:schema", "Print the tables and what their columns mean."),
    "doctor": Verb("pipelines.cli.components:doctor", "Show versions, extras and what may go wrong here."),
}
"""Every verb in the order of the help."""


class LazyGroup(TyperGroup):
    """A group that imports a verb's module when the verb is used, and none for the list of verbs."""

    listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        """All verbs; a verb whose module is not part of this installation is left out."""
        return [name for name, verb in VERBS.items() if find_spec(verb.module) is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The verb, or only its help line while the list of verbs is printed."""
        if cmd_name not in self.list_commands(ctx):
            return None
        verb = VERBS[cmd_name]
        return TyperCommand(name=cmd_name, help=verb.help) if self.listing else verb.load(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The help text, without importing the verbs."""
        self.listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self.listing = False

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that was typed.

        Raises:
            UsageError: there is no such verb; suggests the nearest.
        """
        known = self.list_commands(ctx)
        if args and args[0] not in known:
            raise UsageError(f"there is no command {args[0]!r} → {did_you_mean(args[0], known)}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="buffer-engine",
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print_text(f"buffer-engine {installed_version()}")
        raise typer.Exit


def installed_version() -> str:
    """Version of the installed distribution; a source tree that was never installed has none."""
    try:
        return version("buffer-engine")
    except PackageNotFoundError:
        return "(not installed; running from the source tree)"


@app.callback()
def root(
    debug: Annotated[
        bool, typer.Option("--debug", help=f"show the traceback of an error; the same as {DEBUG_VARIABLE}=1")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """A columnar experience store with operators between the explorer and the trainer of reinforcement fine-tuning."""
    del debug, version  # both act before this: `run_command` looks for the one, the other has a callback


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; the exit code. Never raises, whatever a verb does."""
    found = shadows()
    if found:
        for shadow in found:
            logs.print(f"error: {shadow.render()}", markup=False, soft_wrap=True)
        return 2
    words = list(sys.argv[1:] if arguments is None else arguments)
    debugging = _debugging(words)
    try:
        app(args=words, prog_name="buffer-engine")
    except SystemExit as stop:
        interrupt = _interrupt_behind(stop)
        if interrupt is not None:
            return _interrupted(interrupt)
        return _exit_code(stop)
    except KeyboardInterrupt as interrupt:
        return _interrupted(interrupt)
    except BufferEngineError as error:
        if debugging:
            traceback.print_exc()
        print_error(error)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the border of the program: a person gets one line, the rest goes to a file
        if debugging:
            traceback.print_exc()
            return 1
        logs.print(_unexpected(error), markup=False, soft_wrap=True)
        return 1
    return 0


def _interrupt_behind(stop: SystemExit) -> KeyboardInterrupt | None:
    """The Ctrl-C that became this exit: the command-line library turns it into a silent exit of its own."""
    behind: BaseException | None = stop
    while behind is not None and not isinstance(behind, KeyboardInterrupt):
        behind = behind.__cause__ or behind.__context__
    return behind


def _interrupted(interrupt: KeyboardInterrupt) -> int:
    notes: Sequence[str] = getattr(interrupt, "__notes__", ())
    logs.print("; ".join(("interrupted", *notes)), markup=False, soft_wrap=True)
    return INTERRUPTED


def _exit_code(stop: SystemExit) -> int:
    if isinstance(stop.code, int):
        return stop.code
    return 0 if stop.code is None else 1


def _debugging(words: Sequence[str]) -> bool:
    asked = "--debug" in takewhile(lambda word: word.startswith("-"), words)
    return asked or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def _unexpected(error: Exception) -> str:
    """One line about an error that nobody foresaw, with the file that holds its traceback."""
    said = str(error).strip().split("\n", 1)[0]
    line = f"error: unexpected {type(error).__name__}" + (f": {said}" if said else "")
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="buffer-engine-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write("".join(traceback.format_exception(error)))
    except OSError as failure:
        return f"{line} (the traceback could not be written: {failure.strerror}; {DEBUG_VARIABLE}=1 prints it)"
    return f"{line} (traceback in {file.name}; please report it)"


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run_command())


if __name__ == "__main__":
    main()
