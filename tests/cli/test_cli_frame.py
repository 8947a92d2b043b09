"""The command line's frame: exit codes, streams, lazy verbs, and what a person sees when something goes wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from buffer_engine.errors import MissingExtraError, StoreError
from pipelines.cli import main
from pipelines.cli.console import resumable
from pipelines.cli.main import VERBS, Verb, run_command
from pipelines.cli.shadowing import PACKAGES, ROOT, lookalikes

CALLED = "a_verb_for_tests"


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Make `buffer-engine fail` call a function of the test."""

    def install(function: Callable[[], None]) -> None:
        monkeypatch.setattr(main, CALLED, function, raising=False)
        monkeypatch.setitem(VERBS, "fail", Verb(f"pipelines.cli.main:{CALLED}", "For a test."))  # type: ignore[arg-type]

    return install


def in_a_new_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a fresh interpreter; the last line of stderr is JSON about that process."""
    program = (
        "import json, resource, sys\n"
        "from pipelines.cli.main import run_command\n"
        "code = run_command(sys.argv[1:])\n"
        "sys.stdout.flush()\n"
        "usage = resource.getrusage(resource.RUSAGE_SELF)\n"
        "facts = {'code': code, 'cpu': usage.ru_utime + usage.ru_stime, 'modules': sorted(sys.modules)}\n"
        "print(json.dumps(facts), file=sys.stderr)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=120,
        check=True,
    )


def facts_of(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    return json.loads(done.stderr.splitlines()[-1])


def test_help_lists_the_verbs_and_imports_none_of_them() -> None:
    done = in_a_new_process("--help")
    facts = facts_of(done)

    assert facts["code"] == 0
    assert all(name in done.stdout for name in ("check", "run", "sql", "doctor"))
    heavy = {"torch", "transformers", "duckdb", "polars", "pyarrow", "pydantic", "numpy", "ruamel", "sqlite3"}
    assert not heavy & set(facts["modules"])  # type: ignore[call-overload]


def test_every_verb_has_its_module_and_its_own_help() -> None:
    for name, listed in VERBS.items():
        if name in main.LazyGroup().list_commands(None):
            command = listed.load(name)
            assert command.name == name
            assert (command.help or "").strip(), f"{name} says nothing about itself"


def test_the_page_on_the_command_line_lists_every_verb_and_no_other() -> None:
    table = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").partition("| command |")[2].partition("\n\n")[0]

    listed = re.findall(r"`([\w-]+)(?: [^`]*)?`(?=[^|]*\|[^|]*\|$)", table, re.MULTILINE)
    assert list(dict.fromkeys(listed)) == list(VERBS)


def test_a_verb_that_is_not_part_of_the_installation_breaks_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(VERBS, "absent", Verb("pipelines.cli.no_such_module:absent", "Not there."))  # type: ignore[arg-type]

    assert run_command(["--help"]) == 0
    assert "absent" not in capsys.readouterr().out
    assert run_command(["absent"]) == 2
    assert run_command(["schema", "scores"]) == 0


def test_version_is_printed_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out.startswith("buffer-engine ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["chekc"], "there is no command 'chekc' → did you mean 'check'?"),
        (["schema", "scroes"], "there is no table 'scroes' → did you mean 'scores'?"),
        (["operators", "lenght_filter"], "there is no operator 'lenght_filter' → did you mean 'length_filter'?"),
        (["operators", "grpo"], "there is no operator 'grpo' → use --kind algorithms"),
        (["operators", "--kind", "operator"], "--kind 'operator' is no kind of component"),
        (["doctor", "--require", "trch"], "there is no extra 'trch' → did you mean 'torch'?"),
    ],
)
def test_wrong_words_exit_with_2_and_a_hint_on_stderr(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("arguments", [["check"], ["check", "a.yaml", "--no-such-option"], []])
def test_a_wrong_call_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(arguments) == 2


def test_an_error_of_ours_is_one_sentence_with_its_exit_code(
    verb: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise StoreError("the disk is full → free some space")

    verb(broken)

    assert run_command(["fail"]) == 1
    assert capsys.readouterr().err == "error: the disk is full → free some space\n"


def test_a_missing_extra_exits_with_3(verb: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    def needy() -> None:
        raise MissingExtraError.of("torch", "torch")

    verb(needy)

    assert run_command(["fail"]) == 3
    assert "pip install 'buffer-engine[torch]'" in capsys.readouterr().err


def test_an_interrupt_exits_with_130(verb: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    verb(interrupted)

    assert run_command(["fail"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_interrupt_tells_what_the_verb_noted(
    verb: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted() -> None:
        with resumable(tmp_path):
            raise KeyboardInterrupt

    verb(interrupted)

    assert run_command(["fail"]) == 130
    assert capsys.readouterr().err == "interrupted\n"  # no run was begun in this folder
    (tmp_path / "specs").mkdir()
    assert run_command(["fail"]) == 130
    assert capsys.readouterr().err == f"interrupted; continue with `buffer-engine resume {tmp_path}`\n"


def test_an_exit_code_of_a_verb_is_kept(verb: Callable[..., None]) -> None:
    def found_something() -> None:
        raise typer.Exit(1)

    verb(found_something)

    assert run_command(["fail"]) == 1


def test_an_unforeseen_error_is_one_line_and_its_traceback_a_file(
    verb: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def surprising() -> None:
        raise ZeroDivisionError("seven over nothing")

    verb(surprising)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    assert run_command(["fail"]) == 1

    err = capsys.readouterr().err
    assert err.startswith("error: unexpected ZeroDivisionError: seven over nothing (traceback in ")
    assert err.count("\n") == 1
    written = Path(re.search(r"traceback in (\S+);", err).group(1))  # type: ignore[union-attr]
    assert written.parent == tmp_path
    assert "in surprising" in written.read_text()


@pytest.mark.parametrize("way", ["option", "variable"])
def test_debugging_shows_the_traceback(
    way: str, verb: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise StoreError("torn")

    verb(broken)
    if way == "variable":
        monkeypatch.setenv("BUFFER_ENGINE_DEBUG", "1")

    assert run_command(["--debug", "fail"] if way == "option" else ["fail"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_folder_that_shadows_ours_is_named_before_anything_else(tmp_path: Path) -> None:
    (tmp_path / "operators").mkdir()
    (tmp_path / "operators" / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", "from pipelines.cli.main import run_command; raise SystemExit(run_command(['schema']))"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        timeout=120,
        check=False,
    )

    assert done.returncode == 2
    assert f"{tmp_path.resolve()}/operators is imported in place of {ROOT}/operators" in done.stderr
    assert "rename the folder" in done.stderr
    assert lookalikes(tmp_path) == [tmp_path / "operators"]


def test_ours_are_not_lookalikes_of_themselves() -> None:
    assert all((ROOT / package).is_dir() for package in PACKAGES)
    assert lookalikes(ROOT) == []


def test_output_into_a_closed_pipe_is_no_traceback() -> None:
    done = subprocess.run(
        f"'{sys.executable}' -m pipelines.cli.main schema | head -1",
        shell=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )

    assert done.stdout.startswith("tasks: ")
    assert done.stderr == ""
