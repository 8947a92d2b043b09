"""A specification whose store lies on shared servers: checked, run, and seen by every verb of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from backends import missing, shared_servers
from config_sample import write_sample

from pipelines.cli.main import run_command
from pipelines.load import load_spec
from pipelines.plan import check_file

HELD_OUT = (
    "  heldout: {type: jsonl, split: {share: .5, part: held_out}, path: FOLDER/tasks.jsonl, "
    "prompt: question, partition: eval}\n"
)
STORE = "store: {path: FOLDER/store}"
TRAINER = """trainer:
  type: torch
  model: policy
  algorithm: {type: grpo}
  read: {rows: 16}
  checkpoint: {every_steps: 3}
"""


def errors_of(file: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert run_command(["check", str(file)]) == 2
    return [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines() if line.startswith("error")]


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("catalog: mysql://h/db?schema=s", "store.catalog: catalog: 'mysql' is not a kind of catalog that a store"),
        ("catalog: 'postgresql://h/db'", "and each store has one of its own in the database → add ?schema=NAME"),
        ("segments: 's3a://b/p'", "'s3a' is not a kind of segments that a store can have → did you mean 's3'?"),
        ("catalog: 'postgresql://u:pw@h/db?schema=s'", "the address holds a secret, and a run copies"),
        ("segments: 's3://key:secret@b/p'", "the address holds a secret, and a run copies its specification"),
    ],
)  # fmt: skip
def test_a_wrong_address_is_found_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], store: str, said: str
) -> None:
    file = write_sample(tmp_path, (STORE, f"store: {{path: FOLDER/store, {store}}}"))
    (error,) = errors_of(file, capsys)
    assert ":4: store." in error
    assert said in error
    assert not (tmp_path / "store").exists()


def test_secrets_of_an_address_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = "postgresql://u:${env:CATALOG_PASSWORD}@h/db?schema=s"
    file = write_sample(tmp_path, (STORE, f"store: {{path: FOLDER/store, catalog: '{address}'}}"))
    monkeypatch.setenv("CATALOG_PASSWORD", "hidden")
    plan = check_file(file)
    assert plan.spec.store.catalog == address
    assert plan.config_hash == load_spec(write_sample(tmp_path, name="local.yaml")).config_hash


@pytest.mark.shared
@pytest.mark.skipif(missing() is not None, reason=f"shared back end: {missing()}")
def test_a_run_on_shared_servers_is_seen_from_another_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = shared_servers().new_store()
    addresses = f"catalog: '{where['catalog']}', segments: '{where['segments']}'"
    file = write_sample(
        tmp_path,
        (STORE, f"store: {{path: FOLDER/store, {addresses}}}"),
        (TRAINER, ""),
        ("steps: 6\n  evaluate: {tasks: heldout, every_steps: 3, solved: correct}", "steps: 2"),
        (HELD_OUT, ""),
        ("split: {share: 0.5, part: rest}, ", ""),
    )  # fmt: skip
    assert run_command(["run", str(file)]) == 0, capsys.readouterr().err
    capsys.readouterr()
    from buffer_engine.store import open_store

    folder = tmp_path / "elsewhere"
    open_store(folder, **where, read_only=True).close()
    assert run_command(["sql", str(folder), "SELECT count(*) AS n, min(run_id) AS run FROM rollouts"]) == 0
    assert "32   tiny" in capsys.readouterr().out
    experience_id = _first_id(folder)
    assert run_command(["show", str(folder), experience_id]) == 0
    assert "say yes" in capsys.readouterr().out
    assert run_command(["explain", str(folder), "--row", experience_id]) == 0
    assert experience_id[:8] in capsys.readouterr().out
    for verb in ("verify", "info", "migrate"):
        assert run_command(["store", verb, str(folder)]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "sound" in said
    assert run_command(["sql", str(folder), str(tmp_path / "store"), "SELECT count(*) FROM rollouts"]) == 0
    assert not (folder / "catalog.sqlite").exists()


def _first_id(folder: Path) -> str:
    from buffer_engine.store import open_store

    with open_store(folder, read_only=True) as store:
        return store.table("rollouts", columns=["experience_id"]).column(0)[0].as_py()
