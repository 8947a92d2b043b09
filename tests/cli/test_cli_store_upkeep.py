"""`store compact`, `store erase` and what `store info` says of their effect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from store_rows import decisions, rollouts

from buffer_engine.store import open_store
from pipelines.cli.main import run_command

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """100 rollouts in as many appends, the first 80 rejected."""
    place = tmp_path / "store"
    with open_store(place, durability="process") as store:
        for number in range(100):
            store.append("rollouts", rollouts([number]))
        store.append("decisions", decisions(range(80), "reject"))
        store.append("decisions", decisions(range(80, 100)))
    return place


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run_command([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def test_compact_moves_cold_rows_and_says_how_much(run: Run, folder: Path) -> None:
    code, out, err = run("store", "compact", folder)
    assert (code, err) == (0, "")
    assert f"{folder}: 80 rows of 80 appends are now in 1 Parquet files: " in out
    code, out, _ = run("store", "compact", folder)
    assert f"{folder}: nothing to compact; --all takes waiting and newest rows too" in out
    code, out, _ = run("store", "compact", folder, "--all", "--grace", "0")
    assert code == 0
    assert "3 old files removed" in out  # two streams and the small file of the first compaction
    code, out, _ = run("store", "info", folder)
    cells = {line.split()[0]: line.split()[1:] for line in out.splitlines() if len(line.split()) == 5}
    rows, size, appended, packed = cells["rollouts"]
    assert (rows, appended) == ("100", "0")
    assert size == packed != "0"
    per_row = int(size.replace(",", "")) / 100
    # two of the four tokens of each rollout may train
    assert f"rollouts: {per_row:,.0f} bytes a row, {per_row / 2:,.1f} a trainable token (200 of them)" in out
    assert run("store", "verify", folder)[0] == 0


def test_erase_says_what_would_go_then_does_it(run: Run, folder: Path) -> None:
    rule = ("--rejected-older-than", "7d", "--reason", "licence ended", "--author", "ada")
    code, out, _ = run("store", "erase", folder, *rule, "--dry-run")
    assert (code, "payload of 80 rollouts would go (80 rejected): 320 tokens" in out) == (0, True)
    code, out, _ = run("store", "erase", folder, *rule)
    assert (code, "payload of 80 rollouts erased (80 rejected): 320 tokens" in out) == (0, True)
    assert "1 old files stay for readers; a compaction after the grace removes them" in out
    code, out, _ = run("store", "info", folder)
    assert "bytes of files that no row lies in go with a later compaction" in out
    with open_store(folder, read_only=True) as store:
        assert set(store.table("erasures").column("author").to_pylist()) == {"ada"}


def test_erase_leaves_what_training_wants_unless_forced(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("x3\n\nx90\nx3\n")
    ids = ("--ids", tmp_path / "ids.txt", "--reason", "asked for")
    code, out, _ = run("store", "erase", folder, *ids)
    assert (code, "payload of 1 rollouts erased (1 rejected)" in out) == (0, True)
    assert "1 rows stay: a batch holds them, training waits for them" in out
    code, out, _ = run("store", "erase", folder, *ids, "--force")
    assert "payload of 1 rollouts erased (1 kept)" in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "say which rows"),
        (["--rejected-older-than", "7y"], 2, "'7y' is no age"),
        (["--rejected-older-than", "7d", "--trained-before-step", "3"], 2, "exclude each other"),
        (["--run", "rn"], 2, "did you mean 'run'?"),
        (["--ids", "MISSING"], 2, "it cannot be read"),
        (["--ids", "EMPTY"], 2, "there is no id in it"),
        (["--ids", "WRONG"], 1, "1 of 1 named rows are not stored, the first is 'nobody'"),
    ],
)
def test_a_wrong_rule_is_explained_and_erases_nothing(
    run: Run, folder: Path, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    (tmp_path / "EMPTY").write_text("\n")
    (tmp_path / "WRONG").write_text("nobody\n")
    given = [str(tmp_path / one) if one in ("MISSING", "EMPTY", "WRONG") else one for one in arguments]
    found, _, err = run("store", "erase", folder, "--reason", "r", *given)
    assert found == code, err
    assert said in " ".join(err.split())
    with open_store(folder, read_only=True) as store:
        assert store.table("erasures").num_rows == 0


def test_an_erasure_needs_a_reason(run: Run, folder: Path) -> None:
    assert run("store", "erase", folder, "--run", "run")[0] == 2
    code, _, err = run("store", "erase", folder, "--run", "run", "--reason", " ")
    assert (code, "needs a reason" in err) == (1, True)
