"""Compaction, retention, attachments, damage and copies of a store that several machines share."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import cold_rows
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backends import flip_bit, frame_at, missing, rows_of, shared_servers
from servers import SharedServers
from store_rows import decisions, rollout, rollouts, score, table
from store_workload import fast_processes, write_alone

from buffer_engine.errors import CorruptSegmentError, StoreBusyError, StoreError
from buffer_engine.exchange.backup import back_up, restore
from buffer_engine.inspect import connect_store
from buffer_engine.schema import TABLES
from buffer_engine.store import LocalStore, open_store
from buffer_engine.store.erase import EraseRule
from buffer_engine.store.making import MAKING
from buffer_engine.store.object_media import ObjectMediaFiles
from buffer_engine.store.objects import ObjectFiles
from buffer_engine.store.postgres import PostgresConnection
from buffer_engine.store.recover import recover_store
from buffer_engine.store.sweep import hold_compaction

psycopg = pytest.importorskip("psycopg", reason="shared back end: pip install 'buffer-engine[postgres]'")
pytestmark = [pytest.mark.shared, pytest.mark.skipif(missing() is not None, reason=f"shared back end: {missing()}")]

# pyright: reportPrivateUsage=false


@pytest.fixture(scope="module")
def servers() -> SharedServers:
    return shared_servers()


@pytest.fixture
def where(servers: SharedServers) -> dict[str, str]:
    return servers.new_store()


def fill(store: LocalStore, *, rounds: int = 10, first: int = 0) -> None:
    """Rounds of four rollouts: the first half rejected, the others kept, each scored."""
    for number in range(rounds):
        ids = range(first + 4 * number, first + 4 * number + 4)
        store.append_all(
            {
                "rollouts": rollouts(ids),
                "decisions": decisions(ids, "reject" if number < rounds // 2 else "keep"),
                "scores": table("scores", [score(f"x{one}", float(one)) for one in ids]),
            }
        )


def everything_in(store: LocalStore, *, until: int | None = None) -> dict[str, pa.Table]:
    return {name: store.table(name, until=until) for name in TABLES}


def formats(folder: Path, name: str) -> dict[str, int]:
    return dict(
        rows_of(
            folder,
            "SELECT s.format, sum(f.rows) FROM frames f JOIN segments s USING (segment_id) WHERE f.tbl = ? "
            "GROUP BY s.format",
            name,
        )
    )


def objects_of(store: LocalStore, table_name: str) -> list[str]:
    return [name for name in store._files.names() if name.startswith(f"{table_name}/")]


def test_rows_versions_and_objects_after_a_compaction_seen_from_another_machine(
    tmp_path: Path, where: dict[str, str]
) -> None:
    with open_store(tmp_path / "a", **where) as one, open_store(tmp_path / "b", **where) as other:
        fill(one)
        before, early, version = everything_in(one), everything_in(one, until=5), one.version()
        with other.snapshot():
            lazy = other.scan("rollouts")
            assert len(objects_of(one, "rollouts")) == 10
            done = one.compact(everything=True, grace_seconds=0)
            assert (done.rows, done.removed, done.retired) == (120, 30, 0)
            assert done.freed > done.bytes_before > 0
            assert pa.Table.from_batches(list(lazy)) == before["rollouts"]  # its objects are gone meanwhile
            assert everything_in(other) == before
        assert one.version() == version
        assert everything_in(one) == everything_in(other) == before
        assert everything_in(other, until=5) == early
        assert other.fetch(["x33", "x2"]) == before["rollouts"].take([33, 2])
        assert other.narrow("scores", ["x7"]).to_pylist() == [score("x7", 7.0)]
        assert formats(tmp_path / "b", "rollouts") == {"parquet": 40}
        assert len(objects_of(one, "rollouts")) == 1
        (file,) = other.cold_files("rollouts").files
        assert file.path.is_relative_to(tmp_path / "b" / "cache")
        assert pq.read_table(file.path).num_rows == 40
        info = other.info(tokens=True)
        assert info.bytes == info.cold_bytes
        assert info.trainable_tokens == 40 * sum(rollout(0)["loss_mask"])
        assert one.verify() == other.verify() == []
        with connect_store(other) as inspection:
            assert inspection.rows("SELECT count(*) AS n, sum(reward) AS r FROM experiences") == [{"n": 40, "r": 780.0}]
            assert inspection.rows("SELECT * FROM conservation WHERE NOT balanced") == []


def test_files_stay_for_their_grace_and_small_ones_are_merged(tmp_path: Path, where: dict[str, str]) -> None:
    with open_store(tmp_path / "a", **where) as store:
        fill(store)
        done = store.compact(everything=True, grace_seconds=3600)
        assert (done.retired, done.removed) == (30, 0)
        assert store.info().retired_bytes > 0
        fill(store, first=100)
        done = store.compact(everything=True, grace_seconds=0)
        # two streams of ten appends each, and the first Parquet file of each table
        assert (done.retired, done.removed) == (0, 63)
        assert store.info().retired_bytes == 0
        assert len(store.cold_files("rollouts").files) == 1
        assert len(store._files.names()) == 3
        assert store.verify() == []


def test_one_compactor_on_all_machines(tmp_path: Path, where: dict[str, str], servers: SharedServers) -> None:
    with open_store(tmp_path / "a", **where) as one, open_store(tmp_path / "b", **where) as other:
        fill(one, rounds=2)
        with hold_compaction(one._catalog):
            for store in (one, other):
                with pytest.raises(StoreBusyError, match=r"process \d+ on .* compacts or erases"):
                    store.compact()
                with pytest.raises(StoreBusyError, match="compacts or erases"):
                    store.erase(EraseRule(run_id="run"), reason="r", author="a")
        assert other.compact(everything=True).frames == 6


def test_a_compactor_that_lost_its_session_to_another_changes_nothing(
    tmp_path: Path, where: dict[str, str], servers: SharedServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = ObjectFiles.publish
    with open_store(tmp_path / "a", **where) as one, open_store(tmp_path / "b", **where) as other:
        fill(one, rounds=2)
        before = everything_in(one)
        intruding = [True]

        def intruded(self: ObjectFiles, name: str, made: Path) -> None:
            publish(self, name, made)
            if intruding:
                intruding.clear()
                writer = one._catalog._writer
                assert isinstance(writer, PostgresConnection)
                with psycopg.connect(
                    host="127.0.0.1", port=servers.postgres.port, user="postgres", dbname="stores", autocommit=True
                ) as connection:
                    connection.execute(f"SELECT pg_terminate_backend({writer.raw.info.backend_pid}, 5000)")
                other.compact(everything=True, grace_seconds=0)  # takes the first one's file for left over

        monkeypatch.setattr(ObjectFiles, "publish", intruded)
        with pytest.raises(StoreBusyError, match="repeat"):
            one.compact(everything=True, grace_seconds=0)
        assert everything_in(one) == everything_in(other) == before
        assert one.compact(everything=True, grace_seconds=0).frames == 0
        assert one.verify() == []


def test_a_compactor_killed_anywhere_leaves_the_store_as_it_was(tmp_path: Path, where: dict[str, str]) -> None:
    place = tmp_path / "a"
    open_store(place, **where).close()
    context = fast_processes()
    killed = 0
    for number, calls in enumerate(random.Random(7).sample(range(200, 8000), 6)):
        with open_store(place) as store:
            fill(store, rounds=4, first=100 * number)
            expected = everything_in(store)
        process = context.Process(target=cold_rows.compact_until_killed, args=(str(place), calls))
        process.start()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        killed += process.exitcode != 0
        with open_store(place) as store:
            assert everything_in(store) == expected
            assert store.verify() == []
            store.compact(everything=True, grace_seconds=0)
            assert everything_in(store) == expected
            assert formats(place, "rollouts") == {"parquet": 16 * (number + 1)}
            assert store.verify() == []
            known = {name for (name,) in rows_of(place, "SELECT name FROM segments")}
            assert set(store._files.names()) == known
        assert list((place / MAKING).iterdir()) == []
    assert killed >= 3


def test_writers_in_other_processes_are_not_disturbed(tmp_path: Path, where: dict[str, str]) -> None:
    folder = tmp_path / "a"
    context = fast_processes()
    with open_store(folder, **where) as store:
        workers = [context.Process(target=write_alone, args=(str(folder), number, 10)) for number in (1, 2)]
        for worker in workers:
            worker.start()
        rounds = 0
        while any(worker.is_alive() for worker in workers) or rounds < 3:
            store.compact(everything=True, grace_seconds=0)
            rounds += 1
        for worker in workers:
            worker.join(60)
            assert worker.exitcode == 0
        store.compact(everything=True, grace_seconds=0)
        ids = store.table("rollouts", columns=["experience_id"]).column("experience_id").to_pylist()
        # ten of each worker's own, ten that both wrote
        assert len(ids) == len(set(ids)) == 30
        assert [store.cursor("w1"), store.cursor("w2")] == [10, 10]
        assert {finding.kind for finding in store.verify()} == set()
        assert formats(folder, "rollouts") == {"parquet": 30}


def test_what_is_erased_leaves_the_bucket_and_the_copies_of_every_machine(
    tmp_path: Path, where: dict[str, str]
) -> None:
    secret = "a secret that nobody may read any more"
    message = {"role": "user", "content": secret, "tool_calls": None, "tool_call_id": None, "media": None}

    def holding(folder: Path) -> list[Path]:
        return [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]

    with open_store(tmp_path / "a", **where) as one, open_store(tmp_path / "b", **where) as other:
        one.append("rollouts", rollouts([1, 2], messages=[message]))
        one.append("rollouts", rollouts([3, 4]))
        one.append("decisions", decisions([1, 2], "reject"))
        assert other.table("rollouts").num_rows == 4
        assert len(holding(tmp_path / "a")) == len(holding(tmp_path / "b")) == 1
        done = one.erase(EraseRule(rejected_seconds=1), reason="r", author="a", grace_seconds=0)
        assert (done.rows, done.removed, done.lingering) == (2, 1, ())
        assert holding(tmp_path / "a") == []
        assert other.fetch(["x1", "x3"]).column("token_ids").to_pylist() == [[], rollout(3)["token_ids"]]
        assert one.verify() == other.verify() == []
    open_store(tmp_path / "b").close()  # copies of what is gone go when the folder is next opened
    assert holding(tmp_path / "b") == []


def test_attachments_lie_in_the_bucket_and_are_checked_and_mended(tmp_path: Path, where: dict[str, str]) -> None:
    with open_store(tmp_path / "a", **where) as one, open_store(tmp_path / "b", **where) as other:
        lost, changed = one.put_media(b"lost", "text/plain"), one.put_media(b"changed", "text/plain")
        assert other.media(lost) == b"lost"
        assert one.verify() == other.verify() == []
        copy = tmp_path / "b" / "cache" / "attachments" / lost[:2] / lost
        copy.write_bytes(b"spoiled")
        assert other.media(lost) == b"lost"  # fetched again
        files = other._files
        assert isinstance(files, ObjectFiles)
        files.remove([f"attachments/{lost[:2]}/{lost}"])
        files.write(f"attachments/{changed[:2]}/{changed}", pa.py_buffer(b"other"))
        files.write("attachments/notes.txt", pa.py_buffer(b"mine"))
        with pytest.raises(CorruptSegmentError, match="changed since they were stored"):
            other.media(changed)
        for store in (one, other):  # the first has sound copies of both: verify looks at the bucket
            found = {(finding.kind, finding.where) for finding in store.verify()}
            assert found == {
                ("missing_media", f"media/{lost[:2]}/{lost}"),
                ("checksum", f"media/{changed[:2]}/{changed}"),
                ("orphan", "media/notes.txt"),
            }
        files.remove(["attachments/notes.txt"])
        for data in (b"lost", b"changed"):
            one.put_media(data, "text/plain")
        assert one.verify() == other.verify() == []
        assert isinstance(one._parts.media, ObjectMediaFiles)


def test_verify_looks_at_the_bucket_and_not_at_copies(tmp_path: Path, where: dict[str, str]) -> None:
    with open_store(tmp_path / "a", **where) as one:
        fill(one, rounds=2)
        one.compact(everything=True, grace_seconds=0)
        fill(one, rounds=2, first=100)
        open_store(tmp_path / "b", **where).close()
        _, segment, offset = frame_at(tmp_path / "b", "rollouts", 2)
        flip_bit(tmp_path / "b", segment, offset + 200)
        (cold,) = (file.segment for file in one.cold_files("scores").files)
        flip_bit(tmp_path / "b", cold, 20)
        assert one.table("rollouts").num_rows == 16  # from its copies
        assert {finding.where.partition("@")[0] for finding in one.verify()} == {
            f"segments/{segment}", f"segments/{cold}",
        }  # fmt: skip
        flip_bit(tmp_path / "b", segment, offset + 200)
        flip_bit(tmp_path / "b", cold, 20)
        assert one.verify() == []


def test_a_shared_store_is_exported_whole_and_comes_back_in_a_folder(tmp_path: Path, where: dict[str, str]) -> None:
    with open_store(tmp_path / "a", **where) as store:
        fill(store)
        store.put_media(b"bytes", "text/plain")
        store.compact(everything=True, grace_seconds=0)
        store.erase(EraseRule(rejected_seconds=1), reason="r", author="a", grace_seconds=0)
        expected = everything_in(store)
        back_up(store, tmp_path / "export")
    restore(tmp_path / "export", tmp_path / "back")
    with open_store(tmp_path / "back") as store:
        assert everything_in(store) == expected
        assert store.verify() == []


def test_recovery_is_refused_where_the_folder_holds_only_a_part(tmp_path: Path, where: dict[str, str]) -> None:
    with open_store(tmp_path / "a", **where) as store:
        fill(store, rounds=1)
    with pytest.raises(StoreError, match=r"lie elsewhere \(store.json\).*restore the database, or the bucket"):
        recover_store(tmp_path / "a", tmp_path / "new")
    assert not (tmp_path / "new").exists()
