"""Stores that several machines share: addresses, what a folder remembers, who may run a run, lost connections."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from backends import missing, shared_servers
from servers import SharedServers
from store_rows import child_environment, decisions, rollout, rollouts, table

from buffer_engine.errors import MissingExtraError, StoreBusyError, StoreError, StoreVersionError
from buffer_engine.schema import SCHEMA_VERSION
from buffer_engine.store import LocalStore, open_store
from buffer_engine.store.base import ReadPolicy
from buffer_engine.store.catalog import next_version
from buffer_engine.store.objects import ObjectFiles
from buffer_engine.store.postgres import PostgresConnection, PostgresError

psycopg = pytest.importorskip("psycopg", reason="shared back end: pip install 'buffer-engine[postgres]'")
pytestmark = [pytest.mark.shared, pytest.mark.skipif(missing() is not None, reason=f"shared back end: {missing()}")]

# pyright: reportPrivateUsage=false


@pytest.fixture(scope="module")
def servers() -> SharedServers:
    return shared_servers()


@pytest.fixture
def where(servers: SharedServers) -> dict[str, str]:
    return servers.new_store()


def sql(servers: SharedServers, statement: str) -> None:
    with psycopg.connect(
        host="127.0.0.1", port=servers.postgres.port, user="postgres", dbname="stores", autocommit=True
    ) as connection:
        connection.execute(statement)  # pyright: ignore[reportArgumentType, reportCallIssue]


def schema_of(where: dict[str, str]) -> str:
    return where["catalog"].rpartition("=")[2]


def end_session(servers: SharedServers, store: LocalStore) -> None:
    writer = store._catalog._writer
    assert isinstance(writer, PostgresConnection)
    sql(servers, f"SELECT pg_terminate_backend({writer.raw.info.backend_pid}, 5000)")


def ids(store: LocalStore) -> list[str]:
    return store.table("rollouts", columns=["experience_id"]).column(0).to_pylist()


def test_two_machines_share_a_store_and_each_keeps_copies_of_what_it_read(
    tmp_path: Path, where: dict[str, str]
) -> None:
    with open_store(tmp_path / "a", **where) as one, open_store(tmp_path / "b", **where) as other:
        one.append("rollouts", rollouts([0, 1]))
        assert ids(other) == ["x0", "x1"]
        assert other.append("rollouts", rollouts([0, 1, 2])).unchanged == {"rollouts": 2}
        one.append("decisions", decisions([0, 1]))
        taken = other.reserve(ReadPolicy(rows=2), run_id="run", batch_id="b1", model_version=0)
        assert taken is not None
        assert one.reserve(ReadPolicy(rows=2), run_id="run", batch_id="b2", model_version=0) is None
        assert one.verify() == other.verify() == []
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["cache", "store.json"]


def test_a_folder_remembers_where_its_store_lies_and_no_secrets(tmp_path: Path, where: dict[str, str]) -> None:
    catalog = where["catalog"].replace("postgres@", "postgres:hidden@")
    segments = where["segments"].replace("s3://", "s3://test-access:test-secret@")
    with open_store(tmp_path / "s", catalog=catalog, segments=segments) as store:
        store.append("rollouts", rollouts([0]))
    text = (tmp_path / "s" / "store.json").read_text()
    assert "hidden" not in text
    assert "test-secret" not in text
    assert json.loads(text)["catalog"] == where["catalog"]
    for options in ({}, {"create": False}, {"read_only": True}, where):
        with open_store(tmp_path / "s", **options) as store:  # pyright: ignore[reportArgumentType]
            assert ids(store) == ["x0"]


def test_addresses_that_contradict_the_folder_are_refused(
    tmp_path: Path, where: dict[str, str], servers: SharedServers
) -> None:
    open_store(tmp_path / "s", **where).close()
    with pytest.raises(StoreError, match="this folder belongs to catalog"):
        open_store(tmp_path / "s", **servers.new_store())
    with pytest.raises(StoreError, match="this folder belongs to catalog"):
        open_store(tmp_path / "s", catalog=where["catalog"])
    open_store(tmp_path / "local").close()
    with pytest.raises(StoreError, match="a store that is all in it, not to catalog"):
        open_store(tmp_path / "local", **where)


def test_segments_must_be_where_all_others_look_for_them(
    tmp_path: Path, where: dict[str, str], servers: SharedServers
) -> None:
    open_store(tmp_path / "a", **where).close()
    with pytest.raises(StoreError, match=r"segments of this store lie in s3://stores/store_.*open it with the same"):
        open_store(tmp_path / "b", catalog=where["catalog"], segments=servers.objects.address("elsewhere"))
    with pytest.raises(StoreError, match="open it with the same `segments`"):
        open_store(tmp_path / "c", catalog=where["catalog"])
    assert not (tmp_path / "b" / "store.json").exists()


def test_a_store_that_is_not_there_is_made_only_when_asked(tmp_path: Path, where: dict[str, str]) -> None:
    for options in ({"create": False}, {"read_only": True}):
        with pytest.raises(StoreError, match="there is no store in this schema"):
            open_store(tmp_path / "s", **where, **options)  # pyright: ignore[reportArgumentType]
    open_store(tmp_path / "s", **where).close()
    with open_store(tmp_path / "other", **where, read_only=True) as store:  # a machine that only looks
        assert store.version() == 0
        with pytest.raises(StoreError, match="read_only=True"):
            store.append("rollouts", rollouts([0]))


def test_a_schema_that_was_dropped_is_not_made_again_behind_the_folder(
    tmp_path: Path, where: dict[str, str], servers: SharedServers
) -> None:
    open_store(tmp_path / "s", **where).close()
    sql(servers, f"DROP SCHEMA {schema_of(where)} CASCADE")
    with pytest.raises(StoreError, match="there is no store in this schema"):
        open_store(tmp_path / "s")
    open_store(tmp_path / "new", **where).close()
    with pytest.raises(StoreError, match="another store than the one that this folder belongs to"):
        open_store(tmp_path / "s")


def test_a_schema_with_other_tables_and_other_versions_are_refused(
    tmp_path: Path, where: dict[str, str], servers: SharedServers
) -> None:
    sql(servers, f"CREATE SCHEMA {schema_of(where)}; CREATE TABLE {schema_of(where)}.mine (a int)")
    with pytest.raises(StoreError, match="this schema holds something else"):
        open_store(tmp_path / "s", **where)
    other = servers.new_store()
    open_store(tmp_path / "o", **other).close()
    sql(servers, f"UPDATE {schema_of(other)}.about SET value = {SCHEMA_VERSION + 1} WHERE key = 'schema_version'")
    with pytest.raises(StoreVersionError, match=f"version {SCHEMA_VERSION + 1}.*install a newer"):
        open_store(tmp_path / "o")


def test_a_server_that_does_not_answer_and_a_wrong_key_are_named(tmp_path: Path, servers: SharedServers) -> None:
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1/stores.*cannot connect to PostgreSQL"):
        open_store(tmp_path / "s", catalog="postgresql://postgres@127.0.0.1:1/stores?schema=s")
    where = servers.new_store()
    where["segments"] = where["segments"].replace("s3://", "s3://test-access:wrong@")
    with open_store(tmp_path / "t", **where) as store:
        with pytest.raises(StoreError, match=r"could not write an object.*AWS_ACCESS_KEY_ID") as refusal:
            store.append("rollouts", rollouts([0]))
        assert "wrong" not in str(refusal.value)
        assert store.version() == 0


def test_power_is_refused_on_a_server_that_does_not_sync(
    tmp_path: Path, where: dict[str, str], servers: SharedServers
) -> None:
    sql(servers, "ALTER SYSTEM SET fsync = off")
    try:
        sql(servers, "SELECT pg_reload_conf()")
        with pytest.raises(StoreError, match="durability `power` needs fsync = on, and the server has it off"):
            open_store(tmp_path / "s", **where)
        open_store(tmp_path / "s", **where, durability="process").close()
    finally:
        sql(servers, "ALTER SYSTEM RESET fsync")
        sql(servers, "SELECT pg_reload_conf()")


HOLD = """
import sys
from buffer_engine.store import open_store
with open_store(sys.argv[1]) as store, store.open_run("a/b"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_run_is_held_against_other_machines_and_free_when_its_process_dies(
    tmp_path: Path, where: dict[str, str]
) -> None:
    open_store(tmp_path / "a", **where).close()
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "a")], env=child_environment(), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with open_store(tmp_path / "b", **where) as store:
            with pytest.raises(StoreBusyError, match=f"'a/b' is being run by process {child.pid} on "):
                with store.open_run("a/b"):
                    pass
            child.kill()
            with store.open_run("a/b"), store.open_run("c"):
                with pytest.raises(StoreBusyError, match=f"process {os.getpid()} on"):
                    with store.open_run("a/b"):
                        pass
    finally:
        child.kill()
        child.communicate()


def test_a_run_that_was_taken_over_while_the_connection_was_gone_stops_the_first_holder(
    tmp_path: Path, where: dict[str, str], servers: SharedServers
) -> None:
    with open_store(tmp_path / "a", **where) as one, open_store(tmp_path / "b", **where) as other:
        with one.open_run("run"):
            end_session(servers, one)
            one.append("rollouts", rollouts([0]))  # over a new session, which holds the run again
            with pytest.raises(StoreBusyError):
                with other.open_run("run"):
                    pass
            end_session(servers, one)
            with other.open_run("run"):
                with pytest.raises(StoreBusyError, match="'run' is being run by process"):
                    one.append("rollouts", rollouts([1]))
            one.append("rollouts", rollouts([1]))
        assert ids(one) == ["x0", "x1"]


def test_a_commit_whose_answer_was_lost_is_looked_up(
    tmp_path: Path, where: dict[str, str], servers: SharedServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PostgresConnection.execute
    lost: list[bool] = []

    def losing(connection: PostgresConnection, statement: str, *given: object):
        if statement != "COMMIT" or not lost:
            return real(connection, statement, *given)  # pyright: ignore[reportArgumentType]
        if lost.pop():
            real(connection, "COMMIT")
        connection.raw.close()
        raise PostgresError("the answer was lost", lost=True)

    monkeypatch.setattr(PostgresConnection, "execute", losing)
    with open_store(tmp_path / "s", **where) as store:
        lost.append(True)
        assert store.append("rollouts", rollouts([0]), cursors={"c": 1}).appended == {"rollouts": 1}
        assert (store.version(), ids(store), store.cursor("c")) == (1, ["x0"], 1)
        lost.append(False)
        with pytest.raises(PostgresError, match="the answer was lost"):
            store.append("rollouts", rollouts([1]))
        assert (store.version(), ids(store)) == (1, ["x0"])
        assert store.append("rollouts", rollouts([1])).appended == {"rollouts": 1}
        assert [finding.kind for finding in store.verify()] == ["orphan"]


def test_a_session_that_the_server_ended_is_replaced_between_statements(
    tmp_path: Path, where: dict[str, str], servers: SharedServers
) -> None:
    with open_store(tmp_path / "s", **where) as store:
        store.append("rollouts", rollouts([0]))
        every = (
            f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
            f"AND application_name LIKE 'buffer-engine {os.getpid()} %'"
        )
        sql(servers, every)
        assert ids(store) == ["x0"]
        store.append("rollouts", rollouts([1]))
        with pytest.raises(PostgresError, match=r"PostgreSQL was lost.*repeat it"):  # noqa: PT012 - in a transaction
            with store._catalog.transaction("append rows") as connection:
                sql(servers, every)  # in the middle of a transaction
                next_version(connection)
        assert store.version() == 2


def test_a_spoiled_or_deleted_copy_is_fetched_again(tmp_path: Path, where: dict[str, str]) -> None:
    with open_store(tmp_path / "s", **where) as store:
        store.append("rollouts", rollouts(range(40)))
    (copy,) = (tmp_path / "s" / "cache" / "rollouts").iterdir()
    whole = copy.read_bytes()
    for spoiled in (whole[:-100], whole[:-400] + bytes(400), None):
        copy.unlink()
        if spoiled is not None:
            copy.write_bytes(spoiled)
        with open_store(tmp_path / "s") as store:
            assert ids(store) == [f"x{number}" for number in range(40)]
        assert copy.read_bytes() == whole


def test_copies_are_bounded_and_those_used_longest_ago_go_first(tmp_path: Path, where: dict[str, str]) -> None:
    with open_store(tmp_path / "a", **where) as store:
        for number in range(30):
            store.append("rollouts", rollouts([number]))
    size = next((tmp_path / "a" / "cache" / "rollouts").iterdir()).stat().st_size
    copies = tmp_path / "b" / "cache" / "rollouts"
    with open_store(tmp_path / "b", **where, cache_bytes=10 * size) as store:
        assert ids(store) == [f"x{number}" for number in range(30)]
        assert len(list(copies.iterdir())) == 30  # what was used in the last minute stays
        by_number = sorted(copies.iterdir(), key=lambda path: int(path.stem.rpartition("-")[2]))
        for age, path in enumerate(by_number):
            os.utime(path, (1e9 - age, 1e9 - age))  # the first was used last
    with open_store(tmp_path / "a") as one, open_store(tmp_path / "b", cache_bytes=10 * size) as store:
        one.append("rollouts", rollouts([30]))
        assert store.fetch(["x30"]).num_rows == 1
        held = set(copies.iterdir())
        assert 8 <= len(held) <= 9
        assert len(held - set(by_number)) == 1
        assert held & set(by_number) == set(by_number[: len(held) - 1])
        assert ids(store) == [f"x{number}" for number in range(31)]
        assert store.verify() == []


def test_an_object_that_nobody_listed_is_reported_and_harms_nothing(tmp_path: Path, where: dict[str, str]) -> None:
    with open_store(tmp_path / "s", **where) as store:
        store.append("rollouts", rollouts([0]))
        files = store._files
        assert isinstance(files, ObjectFiles)
        files.write("rollouts/stray-1.arrows", pa.py_buffer(b"x"))
        (finding,) = store.verify()
        assert (finding.kind, finding.where) == ("orphan", "segments/rollouts/stray-1.arrows")
        assert ids(store) == ["x0"]


def test_a_missing_object_is_a_damaged_frame_and_hides_no_other(tmp_path: Path, where: dict[str, str]) -> None:
    with open_store(tmp_path / "a", **where) as store:
        store.append("rollouts", rollouts([0]))
        first = store._files.names()
        store.append("rollouts", rollouts([1]))
        store._files.remove(first[:1])
    with open_store(tmp_path / "b", **where) as store:
        (finding,) = store.verify()
        assert finding.kind == "torn"
        assert "missing" in finding.message
        assert store.fetch(["x1"]).num_rows == 1


@pytest.mark.parametrize("kept", ["catalog", "segments"])
def test_either_half_may_be_shared_alone(tmp_path: Path, where: dict[str, str], kept: str) -> None:
    # PostgreSQL with segments in a folder that all machines mount; objects beside a catalog of one machine
    with open_store(tmp_path / "s", **{kept: where[kept]}) as store:  # pyright: ignore[reportArgumentType]
        store.append("rollouts", rollouts([0, 1]))
        store.append("decisions", decisions([0, 1]))
    with open_store(tmp_path / "s") as store:
        assert store.append("rollouts", rollouts([0, 1, 2])).appended == {"rollouts": 1}
        assert ids(store) == ["x0", "x1", "x2"]
        assert store.verify() == []
    assert (tmp_path / "s" / "segments").exists() == (kept == "catalog")
    assert (tmp_path / "s" / "catalog.sqlite").exists() == (kept == "segments")


def test_writers_take_turns_and_versions_have_no_gaps(tmp_path: Path, where: dict[str, str]) -> None:
    with open_store(tmp_path / "a", **where) as one, open_store(tmp_path / "b", **where) as other:
        versions: list[int] = []

        def write(store: LocalStore, start: int) -> None:
            for number in range(start, start + 15):
                versions.append(store.append("rollouts", rollouts([number], group_size=1)).version)

        threads = [threading.Thread(target=write, args=given) for given in ((one, 0), (other, 100))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(versions) == list(range(1, 31))
        assert one.rollout_state().column("sequence").to_pylist() == list(range(1, 31))
        assert one.verify() == []


FORK = """
import gc, os, sys
from buffer_engine.errors import StoreError
from buffer_engine.store import open_store
store = open_store(sys.argv[1])
child = os.fork()
if child == 0:
    try:
        store.version()
    except StoreError as error:
        store.close()
        del store
        gc.collect()
        os._exit(7 if "fork" in str(error) else 8)
    os._exit(9)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
session = store._catalog._writer.raw.info.backend_pid
with store._catalog.transaction("look") as connection:
    print(code, store.version(), session == connection.raw.info.backend_pid)
"""


def test_a_forked_child_must_open_the_store_itself_and_leaves_the_session_alone(
    tmp_path: Path, where: dict[str, str]
) -> None:
    open_store(tmp_path / "s", **where).close()
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path / "s")], env=child_environment(), capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["7", "0", "True"], done.stderr


def test_a_process_that_closed_its_store_leaves_no_row_behind(
    tmp_path: Path, where: dict[str, str], servers: SharedServers
) -> None:
    with open_store(tmp_path / "a", **where) as store:
        store.append("rollouts", rollouts([0]))
        with open_store(tmp_path / "b", **where) as other:
            assert other._catalog.read().execute("SELECT count(*) FROM writers").fetchone() == (2,)
        assert store._catalog.read().execute("SELECT count(*) FROM writers").fetchone() == (1,)


def test_an_id_with_a_nul_character_is_refused_and_nothing_is_stored(tmp_path: Path, where: dict[str, str]) -> None:
    with open_store(tmp_path / "s", **where) as store:
        with pytest.raises(StoreError, match="cannot hold a text with a NUL character"):
            store.append("rollouts", table("rollouts", [rollout(0, task_id="a\x00b")]))
        assert store.version() == 0
        assert store.append("rollouts", rollouts([0])).appended == {"rollouts": 1}


def test_a_missing_driver_is_named_with_its_install_line(
    tmp_path: Path, where: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'buffer-engine\[postgres\]'"):
        open_store(tmp_path / "s", **where)
