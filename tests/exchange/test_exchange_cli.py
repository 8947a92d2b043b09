"""`store export` and `store import` through the real command line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from exchange_rows import assert_equal_stores, make_dialogues, make_store

from buffer_engine.store.opening import open_store
from pipelines.cli.main import run_command

Said = Callable[..., tuple[str, str]]
TRINITY = Path(__file__).parent / "fixtures" / "trinity-rft-0.6.0.db"


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Run a command that must end with `code`; what it says on stdout and stderr."""

    def call(*arguments: str | Path, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        found = run_command(["store", *(str(argument) for argument in arguments)])
        output = capsys.readouterr()
        assert found == code, output.err
        assert "Traceback" not in output.err
        assert "unexpected" not in output.err
        return output.out, " ".join(output.err.split())

    return call


def test_a_whole_store_goes_out_and_comes_back(tmp_path: Path, said: Said) -> None:
    make_store(tmp_path / "store")
    out, _ = said("export", tmp_path / "store", tmp_path / "out")
    assert out == f"{tmp_path / 'out'}: written: 31 rows, 1 attachment, version 16\n"
    out, _ = said("import", tmp_path / "again", tmp_path / "out", "--dry-run")
    assert "every file is as it was exported; nothing was stored" in out
    assert not (tmp_path / "again").exists()
    out, _ = said("import", tmp_path / "again", tmp_path / "out")
    assert out == f"{tmp_path / 'again'}: restored: 31 rows, 1 attachment, version 16\n"
    out, _ = said("import", tmp_path / "again", tmp_path / "out")
    assert "restored from this export before" in out
    with open_store(tmp_path / "store") as before, open_store(tmp_path / "again") as after:
        assert_equal_stores(before, after)
    _, err = said("import", tmp_path / "store", tmp_path / "out", code=2)
    assert "into a new place only" in err
    out, _ = said("import", tmp_path / "few", tmp_path / "out", "--table", "tasks")
    assert out == f"{tmp_path / 'few'}: tasks: 3 rows added, 0 already there\n"


def test_selections_go_to_a_file_or_a_folder(tmp_path: Path, said: Said) -> None:
    make_dialogues(tmp_path / "store", {0: 1.0, 1: 0.0})
    store, target = tmp_path / "store", tmp_path / "good.jsonl"
    out, _ = said(
        "export", store, target, "--table", "rollouts", "--where", "reward = 1", "--columns", "experience_id,token_ids"
    )
    assert out == f"{target}: 1 row of rollouts in 1 file; version 4\n"
    assert json.loads(target.read_text()) == {"experience_id": "x0", "token_ids": [0, 2, 3, 4]}
    said("export", store, tmp_path / "two", "--format", "jsonl", "--table", "scores", "--view", "groups")
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["groups-00000.jsonl", "scores-00000.jsonl"]
    said("export", store, tmp_path / "q.jsonl", "--sql", "SELECT count(*) AS n FROM experiences;", "--as-of", "3")
    assert json.loads((tmp_path / "q.jsonl").read_text()) == {"n": 2}
    said("export", store, tmp_path / "hf", "--format", "hf", "--table", "rollouts")
    assert (tmp_path / "hf" / "README.md").is_file()


def test_training_data_is_one_command(tmp_path: Path, said: Said) -> None:
    make_dialogues(tmp_path / "store", {0: 1.0, 1: 0.0, 2: 1.0, 3: 1.0})
    out, err = said("export", tmp_path / "store", tmp_path / "pairs.jsonl", "--shape", "preference", "--margin", "0.5")
    assert out == f"{tmp_path / 'pairs.jsonl'}: 1 row of preference in 1 file; version 4\n"
    assert "passed over: 1 groups without two rewards far enough apart" in err
    said("export", tmp_path / "store", tmp_path / "sft", "--shape", "sft")
    assert [path.name for path in (tmp_path / "sft").iterdir()] == ["sft-00000.parquet"]


def test_a_bad_file_is_refused_with_its_lines_or_its_rows_skipped(tmp_path: Path, said: Said) -> None:
    make_dialogues(tmp_path / "store", {0: 1.0})
    said("export", tmp_path / "store", tmp_path / "rows.jsonl", "--table", "scores")
    (tmp_path / "scores.jsonl").write_text((tmp_path / "rows.jsonl").read_text() + "{}\n")
    _, err = said("import", tmp_path / "store", tmp_path / "scores.jsonl", code=1)
    assert "1 bad row, so nothing of it was stored" in err
    assert "scores.jsonl:2: scores: " in err
    out, err = said("import", tmp_path / "store", tmp_path / "scores.jsonl", "--on-invalid", "skip")
    assert out == f"{tmp_path / 'store'}: scores: 0 rows added, 1 already there, 1 skipped\n"
    assert "scores.jsonl:2" in err


def test_a_database_of_trinity_comes_in(tmp_path: Path, said: Said) -> None:
    _, err = said("import", tmp_path / "store", TRINITY, code=2)
    assert "add --table pairs | rollouts" in err
    out, _ = said("import", tmp_path / "store", TRINITY, "--table", "rollouts", "--run", "old", "--dry-run")
    assert "rollouts: 4 sound rows; nothing was stored" in out
    out, err = said("import", tmp_path / "store", TRINITY, "--table", "rollouts", "--run", "old")
    assert "rollouts: 4 rows added, 0 already there" in out
    assert "not imported: advantages of 2 rows" in err
    with open_store(tmp_path / "store") as store:
        assert store.info().runs == ("old",)
        assert store.verify() == []


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["export", "STORE", "out", "--table", "rolouts"], "did you mean 'rollouts'"),
        (["export", "STORE", "out", "--format", "csv", "--table", "scores"], "known: hf, jsonl, parquet"),
        (["export", "STORE", "out", "--shape", "stf"], "did you mean 'sft'"),
        (["export", "STORE", "out", "--shape", "sft", "--table", "scores"], "a shape is exported by itself"),
        (["export", "STORE", "out", "--where", "true"], "name a --table"),
        (["export", "STORE", "out", "--table", "scores", "--table", "tasks", "--where", "true"], "export the others"),
        (["export", "STORE", "STORE", "--table", "scores"], "is there already"),
        (["export", "nowhere", "out"], "there is no store here"),
        (["import", "STORE", "nowhere"], "there is nothing here"),
        (["import", "STORE", "nowhere.db"], "there is no such file"),
        (["import", "STORE", "nowhere", "--on-invalid", "ignore"], "known: refuse, skip"),
        (["import", "STORE", "nowhere", "--format", "pickle"], "known: "),
    ],
)
def test_wrong_calls_say_what_to_do(tmp_path: Path, said: Said, arguments: list[str], wanted: str) -> None:
    make_dialogues(tmp_path / "store", {0: 1.0})
    words = [str(tmp_path / "store") if word == "STORE" else word for word in arguments]
    _, err = said(
        *[str(tmp_path / word) if word in ("out", "nowhere", "nowhere.db") else word for word in words], code=2
    )
    assert wanted in err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not Path("/dev/full").exists() or os.geteuid() != 0, reason="needs root and a small file system")
def test_a_full_disk_leaves_nothing(tmp_path: Path, said: Said) -> None:
    import subprocess

    make_dialogues(tmp_path / "store", dict.fromkeys(range(4000), 1.0))
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        _, err = said("export", tmp_path / "store", small / "out", "--table", "rollouts", "--format", "jsonl", code=1)
        assert "the disk (or a quota or file-size limit) is full" in err
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)
        shutil.rmtree(small)
