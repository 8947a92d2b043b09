"""A person at a second terminal: SQL on a store while a run writes it, and a second run that is refused."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from store_rows import child_environment
from tiny_run import write_specification

from buffer_engine.inspect import named_queries
from buffer_engine.store import open_store
from pipelines.cli.main import run_command

LEARNING = "SELECT model_version, count(*), avg(reward) FROM experiences GROUP BY ALL ORDER BY 1"
STEPS = 30


def asked(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, str]]:
    """What `buffer-engine sql` answers, which it always must."""
    capsys.readouterr()
    code = run_command(["sql", str(folder), "--format", "csv", *words])
    said = capsys.readouterr()
    assert code == 0, said.err
    return list(csv.DictReader(io.StringIO(said.out)))


@pytest.mark.slow
def test_sql_answers_while_the_run_writes_and_its_counts_only_grow(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_specification(tmp_path, tiny_model, steps=STEPS)
    folder = tmp_path / "store"
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelines.cli.main", "run", str(file)], env=child_environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (folder / "specs" / "tiny.yaml").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)

        queries = sorted(named_queries())
        counts: dict[str, int] = {}
        looks, turns = [], 0
        while process.poll() is None:
            now = {row["model_version"]: int(row["count_star()"]) for row in asked(folder, capsys, LEARNING)}
            for version, count in counts.items():
                assert now.get(version, 0) >= count, "rows vanished"
            counts = now
            looks.append(sum(now.values()))
            books = asked(folder, capsys, "FROM conservation")
            assert [book for book in books if book["balanced"] != "true"] == []
            for _ in range(5):
                asked(folder, capsys, "--name", queries[turns % len(queries)])
                turns += 1
            if len(looks) == 2:
                assert run_command(["run", str(file)]) == 1
                said = " ".join(capsys.readouterr().err.split())
                assert f"run 'tiny' is being run by process {process.pid}" in said
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()

    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert len(set(looks)) >= 3, f"the run was over before it could be watched: {looks}"
    assert turns >= len(queries), f"only {turns} of {len(queries)} queries were asked while it ran"

    found = asked(folder, capsys, LEARNING)
    with open_store(folder, read_only=True) as store:
        assert sum(int(row["count_star()"]) for row in found) == store.info().rows["rollouts"]
        steps = [record.step for record in store.batches("tiny") if record.status == "committed"]
        assert store.verify() == []
    skipped = asked(folder, capsys, "SELECT count(*) AS n FROM events WHERE kind = 'starved_step'")
    assert len(steps) + int(skipped[0]["n"]) == STEPS
    assert [int(row["model_version"]) for row in found] == list(range(len(found)))
    for name in queries:
        asked(folder, capsys, "--name", name)
    assert re.search(r"\btiny\b", output)
