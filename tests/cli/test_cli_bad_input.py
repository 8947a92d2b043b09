"""Bad input through the real command line: what a person reads, the exit code, and a store that is still sound."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from store_rows import child_environment
from tiny_run import WORDS, write_specification

from buffer_engine.inspect import connect_store
from buffer_engine.schema import SCHEMA_VERSION
from buffer_engine.store import open_store
from operators.base import Context, Contract, Operator, Result, ScoreOperatorConfig
from operators.registry import OPERATORS
from pipelines.cli.main import run_command

Refused = Callable[..., str]
HALF_A_HEADER = b"\x10\x00\x00\x00\x00\x00\x00\x00{}"
"""Safetensors that promise a header of 16 bytes and end after two."""


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that must end with `code`, say nothing on stdout and show no traceback; what stderr says."""

    def call(code: int, *arguments: str | Path) -> str:
        capsys.readouterr()
        found = run_command([str(argument) for argument in arguments])
        said = capsys.readouterr()
        assert found == code, said.err
        assert said.out == ""
        return readable(said.err)

    return call


def readable(stderr: str) -> str:
    """The text of stderr on one line, after checking that it is written for a person."""
    assert "Traceback" not in stderr
    assert "unexpected" not in stderr, "an error that nobody foresaw"
    return " ".join(stderr.split())


def sound(folder: Path) -> int:
    """Number of rollouts, after checking that nothing in the store is broken."""
    with open_store(folder, create=False, read_only=True) as store:
        assert store.verify() == []
        rows = store.info().rows.get("rollouts", 0)
    with connect_store(folder) as inspection:
        assert inspection.rows("SELECT * FROM conservation WHERE NOT balanced") == []
    return rows


def changed(file: Path, *pairs: tuple[str, str]) -> Path:
    text = file.read_text()
    for old, new in pairs:
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in the specification"
        text = text.replace(old, new)
    file.write_text(text)
    return file


# --- the model, the data, the configuration ---------------------------------------------------------------------------


def no_such_model(folder: Path, file: Path) -> None:
    shutil.rmtree(folder / "model")


def folder_without_a_model(folder: Path, file: Path) -> None:
    shutil.rmtree(folder / "model")
    (folder / "model").mkdir()
    (folder / "model" / "notes.txt").write_text("nothing here")


def damaged_weights(folder: Path, file: Path) -> None:
    (folder / "model" / "model.safetensors").write_bytes(HALF_A_HEADER)


def wrong_dtype(folder: Path, file: Path) -> None:
    changed(file, ("dtype: float32}", "dtype: float16}"))


def empty_dataset(folder: Path, file: Path) -> None:
    (folder / "tasks.jsonl").write_text("")


def missing_dataset(folder: Path, file: Path) -> None:
    (folder / "tasks.jsonl").unlink()


def no_such_column(folder: Path, file: Path) -> None:
    file.write_text(file.read_text().replace("prompt: question", "prompt: qestion"))


def one_row_without_the_column(folder: Path, file: Path) -> None:
    lines = (folder / "tasks.jsonl").read_text().splitlines()
    lines[6] = json.dumps({"wanted": "x"})
    (folder / "tasks.jsonl").write_text("\n".join(lines) + "\n")


def half_a_line(folder: Path, file: Path) -> None:
    lines = (folder / "tasks.jsonl").read_text().splitlines()
    lines[2] = lines[2][:10]
    (folder / "tasks.jsonl").write_text("\n".join(lines) + "\n")


def misspelt_operator(folder: Path, file: Path) -> None:
    changed(file, ("{type: group_reward_std,", "{type: group_rewardstd,"))


@pytest.mark.parametrize(
    ("break_it", "code", "said"),
    [
        (
            no_such_model,
            2,
            r"yaml:\d+: models\.policy\.path: model path .*there is no folder .*→ give a local Hugging Face folder",
        ),
        (folder_without_a_model, 2, r"model has no config\.json → it is not a Hugging Face model folder"),
        (damaged_weights, 1, r"/model does not load: .*header.*is it complete\?"),
        (wrong_dtype, 2, r"yaml:\d+: models\.policy\.dtype: .*'float16'.*(float32|bfloat16)"),
        (empty_dataset, 2, r"tasks\.jsonl is empty → it should have one JSON object per line"),
        (missing_dataset, 2, r"tasks\.jsonl cannot be read: No such file or directory → check the path"),
        (no_such_column, 2, r"yaml:\d+: tasks\.train.*no column 'qestion' → did you mean 'question'\?"),
        (one_row_without_the_column, 1, r"tasks\.jsonl:7: no column 'question'"),
        (half_a_line, 2, r"tasks\.jsonl:3: not JSON .*→ each line must be one JSON object"),
        (misspelt_operator, 2, r"yaml:\d+: operators\.2.*'group_rewardstd' → did you mean 'group_reward_std'\?"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_bad_input_is_named_with_its_place_and_its_fix(
    break_it: Callable[[Path, Path], None], code: int, said: str, tmp_path: Path, tiny_model: Path, refused: Refused
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    file = write_specification(tmp_path, tmp_path / "model", steps=1)
    original = (file.read_text(), (tmp_path / "tasks.jsonl").read_text())
    break_it(tmp_path, file)

    assert re.search(said, refused(code, "run", file))

    if (tmp_path / "store").exists():
        assert sound(tmp_path / "store") == 0
    # mended, the very same command works: nothing half-begun is in the way
    file.write_text(original[0])
    (tmp_path / "tasks.jsonl").write_text(original[1])
    shutil.rmtree(tmp_path / "model", ignore_errors=True)
    shutil.copytree(tiny_model, tmp_path / "model")
    assert run_command(["run", str(file), "--only", "explore"]) == 0
    assert sound(tmp_path / "store") > 0


def test_a_corrected_path_starts_the_run_instead_of_meeting_its_own_first_try(
    tmp_path: Path, tiny_model: Path, refused: Refused
) -> None:
    shutil.copytree(tiny_model, tmp_path / "older")
    (tmp_path / "older" / "model.safetensors").write_bytes(HALF_A_HEADER)
    file = write_specification(tmp_path, tmp_path / "older", steps=1)
    refused(1, "run", file)
    changed(file, (f"path: {tmp_path / 'older'},", f"path: {tiny_model},"))
    assert run_command(["run", str(file), "--only", "explore"]) == 0


def test_a_prompt_longer_than_the_context_is_a_row_and_no_crash(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_specification(tmp_path, tiny_model, steps=2)
    long = [json.dumps({"question": f"{word} {'x' * 300}", "wanted": "a"}) for word in WORDS[:8]]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join([*long, *tasks.read_text().splitlines()]) + "\n")  # the context holds 256 tokens
    assert run_command(["run", str(file)]) == 0
    readable(capsys.readouterr().err)
    with connect_store(tmp_path / "store") as inspection:
        failed = inspection.rows(
            "SELECT split_part(error, ':', 1) AS kind, count(*) > 0 AS some, count(reward) AS rewarded, "
            "sum(uses) AS uses FROM experiences WHERE error IS NOT NULL GROUP BY ALL"
        )
    assert failed == [{"kind": "context", "some": True, "rewarded": 0, "uses": 0}]
    sound(tmp_path / "store")


# --- operators that fail ----------------------------------------------------------------------------------------------


class Odd(Operator[ScoreOperatorConfig]):
    """Gives a score by a function of the reply."""

    Config = ScoreOperatorConfig

    def contract(self) -> Contract:
        return Contract(reads=frozenset(("response",)), scores=(self.config.name,), cost="python")

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        values = [self.value(text) for text in frame["response"]]
        return Result(scores={self.config.name: pl.Series(values, dtype=pl.Float64)})

    def value(self, text: str) -> float:
        raise NotImplementedError


class Raises(Odd):
    """Cannot bear small letters."""

    def value(self, text: str) -> float:
        if re.search("[a-z]", text):
            raise ValueError("a small letter was found")
        return 1.0


class GivesNan(Odd):
    """Divides nothing by nothing."""

    def value(self, text: str) -> float:
        return float("nan")


@pytest.fixture
def odd_specification(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """The tiny pipeline with one of the operators above."""
    monkeypatch.setitem(OPERATORS.builtin, "raises", f"{__name__}:Raises")  # type: ignore[arg-type]
    monkeypatch.setitem(OPERATORS.builtin, "gives_nan", f"{__name__}:GivesNan")  # type: ignore[arg-type]

    def write(line: str) -> Path:
        file = write_specification(tmp_path, tiny_model, steps=1)
        return changed(
            file,
            ("  - {id: ended,", f"  - {line}\n  - {{id: ended,"),
            ("  evaluate: {tasks: heldout, every_steps: 3, solved: right}\n", ""),
        )

    return write


def test_an_operator_that_raises_costs_its_rows_and_sql_shows_the_exception(
    odd_specification: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", str(odd_specification("{id: odd, type: raises, weight: 0}")), "--only", "explore"]) == 0
    assert run_command(["run", str(tmp_path / "tiny-store.yaml"), "--only", "curate"]) == 0
    readable(capsys.readouterr().err)
    with connect_store(tmp_path / "store") as inspection:
        dropped = inspection.rows("SELECT DISTINCT reason, detail FROM drops WHERE operator = 'odd'")
        rows = inspection.rows(
            "SELECT count(*) AS n, count(*) FILTER (regexp_matches(response, '[a-z]')) AS bad, "
            "count(*) FILTER (rejected_by = 'odd') AS dropped FROM experiences"
        )
    assert dropped == [{"reason": "error", "detail": "ValueError: a small letter was found"}]
    assert rows[0]["n"] == 16
    assert rows[0]["bad"] == rows[0]["dropped"] > 0
    sound(tmp_path / "store")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "{id: odd, type: raises, weight: 0, on_error: raise}",
            r"odd.*x[0-9a-f]{24}.*ValueError: a small letter was found",
        ),
        ("{id: odd, type: gives_nan}", r"odd.*(NaN|nan|finite)"),
    ],
)
def test_an_operator_that_may_not_fail_stops_the_run_by_name_and_loses_no_rollout(
    line: str, said: str, odd_specification: Callable[[str], Path], tmp_path: Path, refused: Refused
) -> None:
    file = odd_specification(line)
    assert re.search(said, refused(1, "run", file))
    assert sound(tmp_path / "store") == 16
    with open_store(tmp_path / "store", read_only=True) as store:
        assert store.table("decisions").num_rows == store.table("scores").num_rows == 0


# --- full and read-only disks -----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Callable[[str], Path]]:
    """Mounts, or mounts again with other options, a file system of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = False

    def mount(options: str) -> Path:
        nonlocal mounted
        again = "remount," if mounted else ""
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", again + options, "tmpfs", disk], capture_output=True, check=False
        )
        if done.returncode:
            assert not mounted, done.stderr
            pytest.skip("mounting a small file system needs root (the file-size limit is tested everywhere)")
        mounted = True
        return disk

    yield mount
    if mounted:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("kib", [100, 700, 1_200, 1_800, 2_200, 2_500])
def test_a_full_disk_stops_the_run_and_room_lets_it_go_on(
    kib: int, tmp_path: Path, tiny_model: Path, small_disk: Callable[[str], Path], refused: Refused
) -> None:
    disk = small_disk(f"size={kib}k")
    store = f"store.path={disk / 'store'}"
    file = write_specification(tmp_path, tiny_model, steps=3)

    said = refused(1, "run", file, "--set", store)

    assert str(disk) in said
    assert re.search(r"full|No space left", said)
    assert re.search(r"free space|free some space", said)
    small_disk("size=100m")
    kept: set[str] = set()
    if kib == 100:  # not even a catalog fits
        assert "making the store was interrupted" in refused(1, "sql", disk / "store", "FROM runs")
    else:
        sound(disk / "store")
        with open_store(disk / "store", read_only=True) as opened:
            kept = set(opened.rollout_state().column("experience_id").to_pylist())
    assert run_command(["run", str(file), "--set", store]) == 0
    sound(disk / "store")
    with open_store(disk / "store", read_only=True) as opened:
        assert kept <= set(opened.rollout_state().column("experience_id").to_pylist())
        assert len(opened.batches("tiny")) == 3
        assert opened.info().runs == ("tiny",)


LIMITED = """
import resource, sys
from pipelines.cli.main import run_command
resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, resource.RLIM_INFINITY))
sys.exit(run_command(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_file_size_limit_stops_the_run_and_resume_goes_on_without_it(tmp_path: Path, tiny_model: Path) -> None:
    file = write_specification(tmp_path, tiny_model, steps=2)
    assert run_command(["run", str(file), "--only", "explore"]) == 0
    before = sound(tmp_path / "store")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, "run", str(file)], env=child_environment(), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert re.search(r"file-size limit\) is full.*free space", readable(done.stderr))
    assert sound(tmp_path / "store") == before
    assert run_command(["resume", str(tmp_path / "store")]) == 0
    sound(tmp_path / "store")


def test_a_read_only_store_can_be_asked_and_not_run(
    tmp_path: Path, tiny_model: Path, small_disk: Callable[[str], Path], refused: Refused,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    disk = small_disk("size=100m")
    store = f"store.path={disk / 'store'}"
    file = write_specification(tmp_path, tiny_model, steps=1)
    assert run_command(["run", str(file), "--set", store, "--only", "explore"]) == 0
    small_disk("ro")
    for words in (("run", file, "--set", store), ("run", file, "--set", store + "2"), ("resume", disk / "store")):
        said = refused(2, *words)
        assert re.search(rf"{disk}\S* cannot be written .*→ change its permissions or the path", said), words
    capsys.readouterr()
    assert run_command(["sql", str(disk / "store"), "--format", "csv", "SELECT count(*) AS n FROM rollouts"]) == 0
    assert capsys.readouterr().out.startswith("n\n")
    assert run_command(["store", "verify", str(disk / "store")]) == 0


# --- stores and runs that are not what was meant ----------------------------------------------------------------------


def test_a_store_of_a_newer_version_is_refused_by_every_command(
    tmp_path: Path, tiny_model: Path, refused: Refused
) -> None:
    file = write_specification(tmp_path, tiny_model, steps=1)
    folder = tmp_path / "store"
    open_store(folder).close()
    with sqlite3.connect(folder / "catalog.sqlite") as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    commands: list[tuple[Any, ...]] = [
        ("run", file), ("resume", folder), ("curate", file), ("sql", folder, "FROM runs"), ("show", folder, "x0"),
        ("explain", folder, "--batch", "1"), ("store", "verify", folder), ("store", "info", folder),
    ]  # fmt: skip
    for words in commands:
        said = refused(1, *words)
        assert re.search(rf"version {SCHEMA_VERSION + 1}.*up to {SCHEMA_VERSION}; install a newer", said), words
    # a reader of SQLite leaves its shared-memory index behind, which is no content
    assert {path: path.read_bytes() for path in before} == before


def test_a_folder_that_is_no_store_is_left_alone_by_every_command(
    tmp_path: Path, tiny_model: Path, refused: Refused
) -> None:
    file = write_specification(tmp_path, tiny_model, steps=1)
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")
    assert re.search(r"not a store.*thesis\.tex.*new folder", refused(1, "run", file))
    for words in (
        ("resume", folder), ("sql", folder, "FROM runs"), ("show", folder, "x0"), ("explain", folder, "--batch", "1"),
        ("store", "verify", folder), ("store", "info", folder),
    ):  # fmt: skip
        said = refused(2, *words)
        assert f"{folder}: not a store (catalog.sqlite is missing); name the folder" in said, words
    for words in (("resume", folder / "no"), ("sql", folder / "no", "FROM runs"), ("store", "verify", folder / "no")):
        assert re.search(r"there is no store here|does not exist", refused(2, *words)), words
    assert os.listdir(folder) == ["thesis.tex"]


def test_resume_of_an_unknown_or_a_finished_run_says_which_there_are(
    tmp_path: Path, tiny_model: Path, refused: Refused
) -> None:
    file = write_specification(tmp_path, tiny_model, steps=1)
    assert run_command(["run", str(file)]) == 0
    folder = tmp_path / "store"
    assert f"{folder} has no run 'tniy'; it has: tiny" in refused(2, "resume", folder, "--run", "tniy")
    assert "run 'tiny' is finished; `buffer-engine run` starts another" in refused(2, "resume", folder, "--run", "tiny")
    assert "has no unfinished run; runs there: tiny" in refused(2, "resume", folder)
    sound(folder)


@pytest.mark.slow
def test_two_runs_of_one_name_begun_at_once_are_one_run_and_one_refusal(tmp_path: Path, tiny_model: Path) -> None:
    file = write_specification(tmp_path, tiny_model, steps=4)
    words = [sys.executable, "-m", "pipelines.cli.main", "run", str(file)]
    both = [
        subprocess.Popen(words, env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], said
    winner, loser = sorted(zip(both, said, strict=True), key=lambda pair: pair[0].returncode)
    assert (
        f"run 'tiny' is being run by process {winner[0].pid}; wait for it, stop it, or start a run with another name"
    ) in readable(loser[1])
    sound(tmp_path / "store")
    with open_store(tmp_path / "store", read_only=True) as store:
        assert store.info().runs == ("tiny",)
        assert {record.status for record in store.batches("tiny")} == {"committed"}
