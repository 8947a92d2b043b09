"""`bench store`: every peer in a process of its own, missing ones named, loops cut by their budget, pages filled."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.store import growth, pages, peers_env, shared
from benchmarks.store.data import rollout_rows, score_rows
from benchmarks.store.peers import KINDS, PAYLOAD, PeerKind, Unsupported, padded
from benchmarks.store.process import Process
from buffer_engine.errors import UsageError
from buffer_engine.schema import ROLLOUTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_quick_benchmark_prints_every_measure_and_names_peers_that_are_missing(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- store: begin -->\nold\n<!-- store: end -->\nafter\n", encoding="utf-8")
    command = [sys.executable, "-m", "pipelines.cli.main", "bench", "store", "--quick", "--write", str(page)]
    environment = os.environ | {
        "COLUMNS": "400", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "BUFFER_ENGINE_CACHE": str(tmp_path / "no"),
    }  # fmt: skip
    done = subprocess.run(
        [*command, "--folder", str(tmp_path), "--output", str(tmp_path / "out")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = {line.split("  ")[0].strip(): line for line in done.stdout.splitlines()}
    for measure in (
        "bulk rows/s", "bulk CPU µs/row", "64-row commits rows/s", "64-row commit p50 ms", "64-row commit p99 ms",
        "64-row CPU µs/row", "64 objects rows/s", "batch of 256 p50 ms", "batch of 256 p99 ms", "batch CPU ms",
        "batch / memcpy of it", "late scores, 2,000 keys ms",
        "change rewards, 2,000 keys ms",
        "take 64 rows, 4 trainers p99 ms", "not taken / taken twice", "group-by ms", "bytes/row", "compacted bytes/row",
        "4 writers rows/s", "lost / doubled", "visible p50 ms", "visible p99 ms", "peak memory MB",
    ):  # fmt: skip
        assert measure in lines, f"{measure} is missing in\n{done.stdout}"
        assert len(lines[measure].split()) > len(measure.split())
    assert "failed" not in done.stdout
    assert lines["lost / doubled"].count("0 / 0") == 4  # ours twice, Parquet, SQLite; DuckDB lets no second process in
    for name in ("trinity", "transferqueue", "lance", "delta"):
        assert f"not installed: python -m benchmarks.store.peers_env {name}" in done.stdout
        assert KINDS[name].title in done.stdout
    assert "sequential write, fdatasync per bulk commit" in done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"store.json", "store.md", "store.png"}
    said = json.loads((tmp_path / "out" / "store.json").read_text(encoding="utf-8"))
    ours = said["peers"]["ours"]["values"]
    assert 0 < ours["compacted bytes/row"] < said["row_bytes"]
    assert ours["peak memory MB"] > ours["memory at start MB"] > 0
    assert said["machine"]["bulk rows/s"] > 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- store: begin -->")
    assert text.endswith("<!-- store: end -->\nafter\n")
    assert "| bulk rows/s |" in text
    assert "old" not in text.split()


def test_an_unknown_peer_is_refused_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    from pipelines.cli.main import run_command

    assert run_command(["bench", "store", "--quick", "--peers", "sqlit"]) == 2
    assert "did you mean 'sqlite'" in capsys.readouterr().err


def test_an_unknown_size_is_refused_with_the_sizes_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    from pipelines.cli.main import run_command

    assert run_command(["bench", "store", "--growth", "2m"]) == 2
    assert "none, 10k, 100k, 1m or 10m" in capsys.readouterr().err
    assert growth.sizes_to("1m") == (10_000, 100_000, 1_000_000)
    assert growth.sizes_to("none") == ()


def test_a_page_without_the_marks_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipelines.cli.main import run_command

    page = tmp_path / "page.md"
    page.write_text("no marks", encoding="utf-8")
    assert run_command(["bench", "store", "--quick", "--write", str(page)]) == 2
    assert "<!-- store: begin -->" in capsys.readouterr().err
    with pytest.raises(UsageError, match="has no part to fill"):
        pages.fill(tmp_path / "absent.md", "store", "text")


def test_a_page_may_speak_of_marks_without_being_filled_there(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    about = "between `<!-- store: begin -->` and `<!-- store: end -->`"
    page.write_text(f"{about}\n<!-- store: begin -->\nold\n<!-- store: end -->\nafter\n", encoding="utf-8")
    pages.fill(page, "store", "new")
    wanted = f"{about}\n<!-- store: begin -->\n\nnew\n\n<!-- store: end -->\nafter\n"
    assert page.read_text(encoding="utf-8") == wanted


def test_an_environment_counts_only_when_it_holds_the_releases_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BUFFER_ENGINE_CACHE", str(tmp_path))
    kind = KINDS["lance"]
    assert kind.missing() == "not installed: python -m benchmarks.store.peers_env lance"
    place = tmp_path / "bench" / "lance"
    place.mkdir(parents=True)
    (place / "requirements.txt").write_text("pylance==1.*", encoding="utf-8")
    assert kind.missing() is not None
    (place / "requirements.txt").write_text("\n".join(kind.requirements), encoding="utf-8")
    assert kind.python() == place / "bin" / "python"
    assert peers_env.main(["--remove", "lance"]) == 0
    assert not place.exists()
    with pytest.raises(SystemExit):
        peers_env.main(["parquet"])
    assert "'parquet' needs no environment or is no peer" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ours", "parquet", "duckdb", "sqlite"])
def test_a_peer_gives_back_the_rows_it_was_given(name: str, tmp_path: Path) -> None:
    rows = rollout_rows(300, tokens=20)
    peer = KINDS[name].adapter()(tmp_path)
    peer.append(peer.prepare(rows.slice(0, 200)))
    peer.append_objects(peer.objects(rows.slice(200)))
    ids = rows.column("experience_id").to_pylist()
    assert sorted(peer.ids()) == ids
    assert peer.count() == 300
    asked = [ids[at] for at in (250, 3, 299, 0)]
    found = peer.batch(asked)
    for column in PAYLOAD:
        for at, row in enumerate((250, 3, 299, 0)):
            wanted = rows.column(column)[row].as_py()
            got = np.nan_to_num(found[column][at].astype(np.float64))
            assert got[: len(wanted)] == pytest.approx([float(one or 0) for one in wanted])
            assert not got[len(wanted) :].any()
    peer.score(score_rows(ids[:100]))
    assert sum(int(str(row[2])) for row in peer.group_by()) == 300
    if name in ("ours", "duckdb"):
        peer.compact()
        again = peer.batch(asked)
        assert all(np.array_equal(again[one], found[one], equal_nan=one == "logprobs") for one in PAYLOAD)
    else:
        with pytest.raises(Unsupported):
            peer.compact()
        with pytest.raises(Unsupported):
            peer.take(64, 1, "trainer")
    if name == "ours":
        peer.keep(ids[:200])
        assert peer.take(64, 1, "trainer") == ids[:64]
        assert peer.take(64, 2, "trainer") == ids[64:128]
    if name == "parquet":
        with pytest.raises(Unsupported):
            peer.reward(score_rows(ids[:3], version=2))
    else:
        peer.reward(score_rows(ids[:3], version=2))
    peer.close()


def test_padding_puts_zero_behind_a_row_and_under_a_null() -> None:
    rows = pa.table(
        {
            "token_ids": pa.array([[9], [5, 6, 7], [8]], pa.list_(pa.int32())),
            "loss_mask": pa.array([[True], [False, True, True], [True]], pa.list_(pa.bool_())),
            "logprobs": pa.array([[-9.0], [None, -0.5, -1.0], [-2.0]], pa.list_(pa.float32())),
        }
    ).slice(1)
    found = padded(rows)
    assert found["token_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert found["loss_mask"].tolist() == [[False, True, True], [True, False, False]]
    assert found["logprobs"].tolist() == [[0.0, -0.5, -1.0], [-2.0, 0.0, 0.0]]


def test_narrow_rows_have_keys_of_their_own_and_fit_the_schema() -> None:
    block = rollout_rows(16, tokens=16)
    found = shared.renamed(block, 32)
    assert found.schema == ROLLOUTS.schema
    assert found.column("experience_id").to_pylist() == [f"n{number:010d}" for number in range(32, 48)]
    assert found.column("group_id").to_pylist() == ["h00000004"] * 8 + ["h00000005"] * 8
    assert found.column("token_ids") == block.column("token_ids")


def test_an_append_that_exceeds_its_budget_is_cut_and_says_how_far_it_came(tmp_path: Path) -> None:
    files = [str(shared.write(tmp_path / f"{at}.arrow", rollout_rows(8, first=8 * at, tokens=8))) for at in range(3)]
    with Process(KINDS["parquet"], tmp_path / "parquet" / "main") as process:
        said = process.ask("append", files=files, budget=0.0)
        assert (len(said["walls"]), said["rows"], said["asked"]) == (1, 8, 3)
        assert process.ask("count")["rows"] == 8
        assert process.peak_bytes >= process.start_bytes > 1_000_000


def test_a_peer_that_fails_or_dies_says_so_to_the_one_that_asks(tmp_path: Path) -> None:
    with Process(KINDS["parquet"], tmp_path / "parquet" / "main") as process:
        with pytest.raises(RuntimeError, match="FileNotFoundError"):
            process.ask("append", files=[str(tmp_path / "absent.arrow")])
        with pytest.raises(Unsupported, match="no such operation"):
            process.ask("compact")
        process.kill()
        with pytest.raises((RuntimeError, BrokenPipeError)):
            process.ask("count")
    broken = dataclasses.replace(KINDS["parquet"], name="parquet")
    assert isinstance(broken, PeerKind)
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(RuntimeError, match="Error"):
        Process(broken, tmp_path / "file")


@pytest.mark.slow
def test_growth_measures_each_size_and_says_where_a_peer_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "PEER_BUDGET", 0.02)  # one block of rows, whatever the machine
    found = growth.grow([KINDS["ours"], KINDS["parquet"]], (9000, 20_000), tmp_path, lambda text: None)
    ours, later, parquet = (*found[:2], found[-1])
    assert (ours.rows, later.rows, later.cut) == (9000, 20_000, "")
    assert parquet.rows == growth.BLOCK
    assert "for 9,000" in parquet.cut
    for one in found:
        assert {"64-row append p50 ms", "batch of 256 p50 ms", "group-by ms", "bytes/row"} <= set(one.values)
        assert all(isinstance(value, float) and value > 0 for value in one.values.values())
