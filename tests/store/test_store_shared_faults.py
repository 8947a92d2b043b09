"""Kills on shared servers, of writers at random points and of PostgreSQL under writers: no acknowledged row is lost."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from backends import missing, shared_servers
from servers import PostgresServer, SharedServers
from store_rows import rollout, rollouts
from store_workload import fast_processes, live

from buffer_engine.errors import StoreError
from buffer_engine.store import open_store

psycopg = pytest.importorskip("psycopg", reason="shared back end: pip install 'buffer-engine[postgres]'")
pytestmark = [pytest.mark.shared, pytest.mark.skipif(missing() is not None, reason=f"shared back end: {missing()}")]

SELF_KILLS = 20
TIMED_KILLS = 8


def acknowledged(path: Path, what: str) -> set[int]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(number) for line in lines if line.split()[0] == what for number in line.split()[1:]}


def check(folder: Path, acks: Path, *, everything: bool = True) -> int:
    """Whatever was promised is there, once; returns how many objects nobody refers to."""
    with open_store(folder, durability="process") as store:
        findings = store.verify() if everything else []
        assert {finding.kind for finding in findings} <= {"orphan"}, findings
        ids = store.table("rollouts", columns=["experience_id"]).column(0).to_pylist()
        assert len(set(ids)) == len(ids)
        assert {f"x{number}" for number in acknowledged(acks, "rows")} - set(ids) == set()
        state = {row["experience_id"]: row for row in store.rollout_state().to_pylist()}
        assert [number for number in acknowledged(acks, "kept") if state[f"x{number}"]["status"] != "kept"] == []
        batches = {record.step: record for record in store.batches("run") if record.step is not None}
        assert [step for step in acknowledged(acks, "prepared") if step not in batches] == []
        assert [step for step in acknowledged(acks, "committed") if batches[step].status != "committed"] == []
        committed = [
            row["experience_id"]
            for row in store.table("batch_rows").to_pylist()
            if batches[int(row["batch_id"][1:])].status == "committed"
        ]
        assert len(set(committed)) == len(committed)
        assert {one for one, row in state.items() if row["uses"] == 1} == set(committed)
        assert sum(row["uses"] for row in state.values()) == len(committed)
        return len(findings)


@pytest.mark.slow
def test_no_kill_of_a_writer_loses_an_acknowledged_row_or_counts_a_batch_twice(tmp_path: Path) -> None:
    servers = shared_servers()
    context, dice = fast_processes(), random.Random(20250101)
    folder, acks = tmp_path / "s", tmp_path / "acks"
    open_store(folder, **servers.new_store()).close()
    killed = orphans = 0
    for attempt in range(SELF_KILLS + TIMED_KILLS):
        calls = dice.randrange(500, 20_000) if attempt < SELF_KILLS else 0
        child = context.Process(target=live, args=(str(folder), str(acks), calls, 3 if calls else 1_000))
        child.start()
        if not calls:
            time.sleep(dice.uniform(0.3, 1.5))
            child.kill()
        child.join(60)
        assert child.exitcode in (-signal.SIGKILL, 0), f"attempt {attempt}: exit code {child.exitcode}"
        killed += child.exitcode == -signal.SIGKILL
        orphans = check(folder, acks, everything=attempt % 8 == 7)
    assert killed >= 20
    child = context.Process(target=live, args=(str(folder), str(acks), 0, 2))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert check(folder, acks) >= orphans
    with open_store(folder) as store:
        rows = store.table("rollouts").to_pylist()
        assert rows == [rollout(number) for number in range(len(rows))]
        trained = [row["experience_id"] for row in store.table("batch_rows").to_pylist()]
        assert trained == [f"x{number}" for number in range(len(trained))]
        assert len(trained) >= 40


@dataclass
class Writer:
    """A writer that does what the errors say: it repeats the write that failed."""

    folder: Path
    first: int
    acknowledged: list[int] = field(default_factory=list[int])
    refused: list[str] = field(default_factory=list[str])
    failure: BaseException | None = None

    def run(self, stop: threading.Event) -> None:
        """Append pairs of rows until told to stop."""
        try:
            with open_store(self.folder, durability="process") as store:
                number = self.first
                while not stop.is_set():
                    try:
                        store.append("rollouts", rollouts([number, number + 1]), cursors={f"w{self.first}": number + 2})
                    except StoreError as error:
                        self.refused.append(str(error))
                        time.sleep(0.02)
                    else:
                        self.acknowledged += [number, number + 1]
                        number += 2
        except BaseException as error:
            self.failure = error


@contextmanager
def writing(writers: list[Writer]) -> Generator[None]:
    """Writers at work while the block runs, and for a moment after it."""
    stop = threading.Event()
    threads = [threading.Thread(target=writer.run, args=(stop,)) for writer in writers]
    for thread in threads:
        thread.start()
    try:
        yield
        before = [len(writer.acknowledged) for writer in writers]
        deadline = time.monotonic() + 30
        while any(len(writer.acknowledged) <= count for writer, count in zip(writers, before, strict=True)):
            assert time.monotonic() < deadline, [writer.refused[-1:] for writer in writers]
            time.sleep(0.01)
    finally:
        stop.set()
        for thread in threads:
            thread.join(90)


def a_session_of(servers: SharedServers, dice: random.Random) -> int:
    """Process id of a server process that serves a writer."""
    with psycopg.connect(host="127.0.0.1", port=servers.postgres.port, user="postgres", dbname="stores") as connection:
        found = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'buffer-engine %' ORDER BY pid"
        ).fetchall()
    return dice.choice(found)[0]


@pytest.fixture
def own_servers() -> Generator[SharedServers]:
    """A PostgreSQL of its own: after a crash it syncs all it has, which of all other tests together takes long."""
    servers = SharedServers(PostgresServer(), shared_servers().objects)
    servers.postgres.start()
    yield servers
    servers.postgres.close()


@pytest.mark.slow
def test_killing_postgresql_under_writers_loses_and_doubles_nothing(tmp_path: Path, own_servers: SharedServers) -> None:
    servers, dice = own_servers, random.Random(7)
    where = servers.new_store()
    writers = [Writer(tmp_path / f"m{at}", first=at * 100_000) for at in range(2)]
    for writer in writers:
        open_store(writer.folder, **where).close()
    with writing(writers):
        for attempt in range(5):
            time.sleep(dice.uniform(0.3, 0.8))
            if attempt in (1, 4):
                servers.postgres.stop("immediate")
                servers.postgres.start()
            else:  # the death of one server process makes PostgreSQL end all others and recover
                os.kill(a_session_of(servers, dice), signal.SIGKILL)
                servers.postgres.wait()
    for writer in writers:
        assert writer.failure is None
        assert len(writer.acknowledged) > 20
        assert any("PostgreSQL" in one for one in writer.refused)
        assert all("repeat" in one or "cannot connect" in one for one in writer.refused), set(writer.refused)
    with open_store(tmp_path / "check", **where) as store:
        ids = store.table("rollouts", columns=["experience_id"]).column(0).to_pylist()
        assert len(set(ids)) == len(ids)
        assert {f"x{number}" for writer in writers for number in writer.acknowledged} - set(ids) == set()
        for writer in writers:
            # one append after the last acknowledged one may have been committed, and never half of it
            stored = sorted(int(one[1:]) for one in ids if int(one[1:]) // 100_000 == writer.first // 100_000)
            assert stored == list(range(writer.first, writer.first + len(stored)))
            assert len(stored) - len(writer.acknowledged) in (0, 2)
        assert {finding.kind for finding in store.verify()} <= {"orphan"}


@pytest.mark.slow
def test_an_object_store_that_stops_refuses_appends_and_loses_nothing(tmp_path: Path) -> None:
    servers = shared_servers()
    where = servers.new_store()
    where["segments"] += "&request_timeout=1"
    with open_store(tmp_path / "s", **where) as store:
        store.append("rollouts", rollouts([0]))
        servers.objects.pause()
        try:
            with pytest.raises(StoreError, match=r"could not write an object.*then repeat"):
                store.append("rollouts", rollouts([1]))
            assert store.version() == 1
        finally:
            servers.objects.resume()
        assert store.append("rollouts", rollouts([1])).appended == {"rollouts": 1}
        assert {finding.kind for finding in store.verify()} <= {"orphan"}
