"""Compaction: rows move into Parquet files, and nobody who reads, writes or trains can tell.

On one machine: stores of hundreds of appends, copied, damaged and short of disk. See `test_store_shared_upkeep.py` for
the same on shared servers.
"""

from __future__ import annotations

import multiprocessing
import random
import resource
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import cold_rows
import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_rows import WHEN, decisions, manifest, rollouts, score, table, task
from store_workload import fast_processes, write_alone

from buffer_engine.errors import CorruptSegmentError, StoreBusyError, StoreError
from buffer_engine.schema import TABLES
from buffer_engine.store import LocalStore, open_store
from buffer_engine.store.base import ReadPolicy
from buffer_engine.store.making import MAKING
from buffer_engine.store.sweep import hold_compaction


def fill(folder: Path, *, rounds: int = 160) -> None:
    """Rounds of four rollouts: the first half rejected, the others kept, each scored."""
    with open_store(folder, durability="process") as store:
        store.append("tasks", table("tasks", [task(f"t{number}") for number in range(2 * rounds)]))
        for number in range(rounds):
            ids = range(4 * number, 4 * number + 4)
            store.append("rollouts", rollouts(ids))
            verdict = "reject" if number < rounds // 2 else "keep"
            store.append_all(
                {
                    "decisions": decisions(ids, verdict),
                    "scores": table("scores", [score(f"x{one}", float(one)) for one in ids]),
                }
            )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fill(tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[LocalStore]:
    with open_store(folder, durability="process") as opened:
        yield opened


def everything_in(store: LocalStore, *, until: int | None = None) -> dict[str, pa.Table]:
    return {name: store.table(name, until=until) for name in TABLES}


def formats(folder: Path, name: str) -> dict[str, int]:
    """Rows of a table by the kind of file that they lie in."""
    with sqlite3.connect(folder / "catalog.sqlite") as catalog:
        found = catalog.execute(
            "SELECT format, sum(rows) FROM frames JOIN segments USING (segment_id) WHERE frames.tbl = ? GROUP BY 1",
            (name,),
        )
        return dict(found.fetchall())


def on_disk(folder: Path, end: str) -> set[str]:
    files = (path for path in (folder / "segments").rglob(f"*{end}") if path.is_file())
    return {str(path.relative_to(folder / "segments")) for path in files}


def test_rows_and_earlier_versions_are_the_same_before_and_after(store: LocalStore) -> None:
    before, early = everything_in(store), everything_in(store, until=77)
    done = store.compact(everything=True)
    assert done.rows == sum(rows.num_rows for rows in before.values())
    assert everything_in(store) == before
    assert everything_in(store, until=77) == early
    assert store.fetch(["x300", "x5", "x6"]) == before["rollouts"].take([300, 5, 6])
    assert store.narrow("scores", ["x7"]).to_pylist() == [score("x7", 7.0)]
    assert [batch.num_rows for batch in store.scan("scores", after=store.version() - 2)] == [4]
    assert store.verify() == []


def test_the_version_does_not_count_a_compaction(store: LocalStore) -> None:
    before = store.version()
    store.compact(everything=True)
    assert store.version() == before


def test_what_training_waits_for_stays_as_it_was_appended(store: LocalStore, folder: Path) -> None:
    store.compact()
    # half of the rows are rejected, the others are kept and never trained
    assert formats(folder, "rollouts") == {"parquet": 320, "arrows": 320}
    # of 160 frames of four rows the newest 64 stay
    assert formats(folder, "scores") == {"parquet": 4 * 96, "arrows": 4 * 64}
    reserved = store.reserve(ReadPolicy(rows=320), run_id="run", batch_id="b", model_version=0)
    assert reserved is not None
    batch, rows = manifest("b", 1, reserved.experience_ids)
    store.prepare_batch(reserved, step=1, batch=batch, rows=rows)
    store.compact()
    assert formats(folder, "rollouts") == {"parquet": 320, "arrows": 320}
    store.commit_batch("b", step=1)
    store.compact(max_uses=2)
    assert formats(folder, "rollouts") == {"parquet": 320, "arrows": 320}
    store.compact()
    assert formats(folder, "rollouts") == {"parquet": 640}


def test_a_second_compaction_of_the_same_rows_has_nothing_to_do(store: LocalStore) -> None:
    assert store.compact(everything=True).frames > 0
    again = store.compact(everything=True)
    assert (again.frames, again.files) == (0, ())


def test_only_the_named_tables_are_compacted(store: LocalStore, folder: Path) -> None:
    store.compact(everything=True, tables=["scores"])
    assert formats(folder, "scores") == {"parquet": 640}
    assert formats(folder, "rollouts") == {"arrows": 640}


def test_duckdb_and_polars_and_pyarrow_read_the_files_without_this_package(store: LocalStore) -> None:
    expected = store.table("rollouts")
    store.compact(everything=True)
    (file,) = store.cold_files("rollouts").files
    by_duckdb = duckdb.sql(
        f"SELECT experience_id, token_ids, logprobs, messages[1].content AS said FROM read_parquet('{file.path}')"
    ).to_arrow_table()
    assert by_duckdb.column("experience_id").to_pylist() == expected.column("experience_id").to_pylist()
    assert by_duckdb.column("token_ids").to_pylist() == expected.column("token_ids").to_pylist()
    assert by_duckdb.column("logprobs").to_pylist() == expected.column("logprobs").to_pylist()
    assert by_duckdb.column("said")[5].as_py() == "question 5"
    by_polars = pl.read_parquet(file.path)
    assert by_polars["loss_mask"].to_list() == expected.column("loss_mask").to_pylist()
    assert by_polars["messages"].to_list() == expected.column("messages").to_pylist()
    assert pq.read_table(file.path).column("created_at").to_pylist() == expected.column("created_at").to_pylist()
    described = pq.read_metadata(file.path)
    column = described.row_group(0).column(0)
    assert column.compression == "ZSTD"
    assert column.has_offset_index
    assert column.has_column_index
    assert column.statistics is not None


def test_a_snapshot_that_is_older_than_compaction_and_removal_reads_on(folder: Path) -> None:
    with open_store(folder, read_only=True) as reader:
        with reader.snapshot():
            lazy = reader.scan("rollouts")
            with open_store(folder, durability="process") as other:
                expected = everything_in(other)
                other.compact(everything=True, grace_seconds=0)
            assert on_disk(folder, ".arrows") == set()
            assert pa.Table.from_batches(list(lazy)) == expected["rollouts"]
            assert everything_in(reader) == expected
            with open_store(folder, durability="process") as other:  # and once more, file to file
                other.append("rollouts", rollouts(range(1000, 1400)))
                other.compact(everything=True, grace_seconds=0)
            assert everything_in(reader)["rollouts"] == expected["rollouts"]
        assert reader.table("rollouts").num_rows == 1040


def test_old_files_stay_for_their_grace_and_go_with_a_later_compaction(folder: Path) -> None:
    streams = on_disk(folder, ".arrows")
    with open_store(folder, durability="process") as store:
        done = store.compact(everything=True, grace_seconds=3600)
        assert (done.retired, done.removed) == (len(streams), 0)
        assert on_disk(folder, ".arrows") == streams
        assert store.info().retired_bytes > 0
        done = store.compact(everything=True, grace_seconds=0)
        assert (done.retired, done.removed) == (0, len(streams))
        assert done.freed > 0
        assert on_disk(folder, ".arrows") == set()
        assert store.info().retired_bytes == 0
        assert store.verify() == []


def test_a_file_that_a_process_appends_to_stays_until_that_process_leaves_it(folder: Path) -> None:
    with open_store(folder, durability="process") as writer:
        writer.append("rollouts", rollouts(range(1000, 1004)))
        with open_store(folder, durability="process") as store:
            store.compact(everything=True, grace_seconds=0)
            (mine,) = on_disk(folder, ".arrows")
            assert mine.startswith("rollouts/")
            assert formats(folder, "rollouts") == {"parquet": 644}
            writer.append("rollouts", rollouts(range(1004, 1008)))
            assert formats(folder, "rollouts") == {"parquet": 644, "arrows": 4}
            store.compact(everything=True, grace_seconds=0)
            assert on_disk(folder, ".arrows") == {mine}
            writer.close()
            assert store.compact(everything=True, grace_seconds=0).removed == 1
            assert on_disk(folder, ".arrows") == set()
            assert store.table("rollouts").num_rows == 648
            assert store.verify() == []


def test_two_compactors_at_once_is_one_too_many(store: LocalStore) -> None:
    with hold_compaction(store._catalog), pytest.raises(StoreBusyError, match=r"process \d+ compacts or erases"):
        store.compact()
    assert store.compact().frames > 0


@pytest.mark.parametrize(
    "policy",
    [
        ReadPolicy(rows=32),
        ReadPolicy(type="uniform", rows=32, seed=3),
        ReadPolicy(type="prioritized", by="reward", rows=32, seed=3),
        ReadPolicy(type="mixture", expert_share=0.25, rows=32, seed=3),
        ReadPolicy(rows=32, max_tokens=64, balance="length"),
    ],
    ids=lambda policy: policy.type,
)
def test_a_policy_draws_the_same_rows_after_a_compaction(folder: Path, tmp_path: Path, policy: ReadPolicy) -> None:
    shutil.copytree(folder, tmp_path / "other")
    drawn = []
    for place in (folder, tmp_path / "other"):
        with open_store(place, durability="process") as store:
            if place != folder:
                store.compact(everything=True, grace_seconds=0)
            drawn.append([
                store.reserve(policy, run_id="run", batch_id=f"b{number}", model_version=0) for number in range(3)
            ])  # fmt: skip
    assert drawn[0][0] is not None
    assert [one and one.experience_ids for one in drawn[0]] == [one and one.experience_ids for one in drawn[1]]


def test_a_repeated_append_of_compacted_rows_is_a_no_op(store: LocalStore) -> None:
    store.compact(everything=True)
    receipt = store.append("rollouts", rollouts(range(640)))
    assert receipt.appended == {"rollouts": 0}


def test_cold_files_and_frames_are_the_whole_table_at_a_version(store: LocalStore) -> None:
    store.compact()
    for version in (store.version(), 150, 20):
        for name in ("rollouts", "decisions"):
            found = store.cold_files(name, until=version)
            read = [pq.read_table(file.path).select(["experience_id"]) for file in found.files]
            read += [pa.Table.from_batches([store.frame_batch(one, ["experience_id"])]) for one in found.frames]
            ids = [one for part in read for one in part.column("experience_id").to_pylist()]
            expected = store.table(name, until=version).column("experience_id").to_pylist()
            assert sorted(ids) == sorted(expected)
            if name == "decisions":  # files before frames: in order of commit
                assert ids == expected
    assert len(store.cold_files("rollouts").files) == 1
    assert store.cold_files("rollouts", until=20).files == ()


@settings(max_examples=15, deadline=None)
@given(
    actions=st.lists(
        st.one_of(st.tuples(st.just("append"), st.integers(1, 90)), st.tuples(st.just("compact"), st.booleans())),
        min_size=1,
        max_size=12,
    )
)
def test_whatever_is_appended_and_compacted_files_and_frames_are_the_log_in_order(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]]
) -> None:
    with open_store(tmp_path_factory.mktemp("store"), durability="process") as store:
        count = 0
        for action, value in actions:
            if action == "append":
                for _ in range(value):
                    row = {"run_id": "run", "step": count, "name": "m", "value": 1.0, "recorded_at": WHEN}
                    store.append("metrics", table("metrics", [row]))
                    count += 1
            else:
                store.compact(everything=bool(value), grace_seconds=0)
        steps = store.table("metrics", columns=["step"]).column("step").to_pylist()
        assert steps == list(range(count))
        found = store.cold_files("metrics")
        parts = [(file.first_frame, pq.read_table(file.path).column("step").to_pylist()) for file in found.files]
        parts += [(one.frame_id, store.frame_batch(one).column("step").to_pylist()) for one in found.frames]
        assert [step for _, part in sorted(parts) for step in part] == steps
        assert store.verify() == []


def test_a_writer_in_another_process_is_not_disturbed(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    fill(folder, rounds=100)
    context = fast_processes()
    with open_store(folder, durability="process") as store:
        workers = [context.Process(target=write_alone, args=(str(folder), number, 40)) for number in (1, 2)]
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
        # 400 of the store, 40 of each worker's own, 40 that both wrote
        assert len(ids) == len(set(ids)) == 400 + 80 + 40
        assert [store.cursor("w1"), store.cursor("w2")] == [40, 40]
        assert store.verify() == []
        assert formats(folder, "rollouts") == {"parquet": 520}


def test_a_compactor_killed_anywhere_leaves_the_store_as_it_was(folder: Path, tmp_path: Path) -> None:
    with open_store(folder, read_only=True) as store:
        expected = everything_in(store)
    context = fast_processes()
    killed = 0
    for calls in [*random.Random(7).sample(range(1, 4000), 14), 100_000_000]:
        place = tmp_path / "copy"
        shutil.copytree(folder, place)
        process = context.Process(target=cold_rows.compact_until_killed, args=(str(place), calls))
        process.start()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        killed += process.exitcode != 0
        with open_store(place, durability="process") as store:
            assert store.verify() == []
            assert everything_in(store) == expected
            store.compact(everything=True, grace_seconds=0)
            assert everything_in(store) == expected
            assert store.verify() == []
            assert formats(place, "rollouts") == {"parquet": 640}
        assert [path.name for path in (place / MAKING).iterdir()] == ["compact.lock"]
        with sqlite3.connect(place / "catalog.sqlite") as catalog:
            known = {row[0] for row in catalog.execute("SELECT name FROM segments")}
        assert on_disk(place, "") - known == set()
        shutil.rmtree(place)
    assert killed >= 8


def _compact_with_little_room(folder: str, limit: int) -> None:
    with open_store(Path(folder), durability="process") as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(StoreError, match="full"):
            store.compact(everything=True)


def test_a_full_disk_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    place = tmp_path / "store"
    with open_store(place, durability="process") as store:
        store.append("rollouts", cold_rows.realistic(range(200)))
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_compact_with_little_room, args=(str(place), 600_000))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert [path.name for path in (place / MAKING).iterdir()] == ["compact.lock"]  # its room is free again
    with open_store(place, durability="process") as store:
        assert store.verify() == []
        assert formats(place, "rollouts") == {"arrows": 200}
        assert store.compact(everything=True).rows == 200
        assert store.verify() == []


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pa.Table]:
    """A compacted store of 1,600 realistic rows in 50 frames, and the rows."""
    place = tmp_path_factory.mktemp("heavy") / "store"
    rows = cold_rows.realistic(range(1600))
    with open_store(place, durability="process") as store:
        for start in range(0, 1600, 32):
            store.append("rollouts", rows.slice(start, 32))
    with open_store(place, durability="process") as store:
        store.compact(everything=True, grace_seconds=0)
    return place, rows


def test_cold_rows_take_at_most_55_percent_of_their_raw_bytes(heavy: tuple[Path, pa.Table]) -> None:
    place, rows = heavy
    with open_store(place, read_only=True) as store:
        found = store.info(tokens=True)
        assert found.bytes == found.cold_bytes
        assert found.bytes_per_row is not None
        assert found.bytes_per_row <= 0.55 * rows.nbytes / 1600
        trainable = sum(sum(mask) for mask in rows.column("loss_mask").to_pylist())
        assert found.trainable_tokens == trainable
        assert found.bytes_per_trainable_token == found.bytes["rollouts"] / trainable
        assert store.table("rollouts") == rows


def test_a_read_of_narrow_columns_decodes_no_others(heavy: tuple[Path, pa.Table]) -> None:
    place, _ = heavy
    with open_store(place, read_only=True) as store:
        store.table("rollouts", columns=["stop_reason"])
        assert {name for _, _, name in store._reader._cold._kept} == {"stop_reason"}
        store.fetch(["x3"], columns=["token_ids"])
        assert {name for _, _, name in store._reader._cold._kept} == {"stop_reason", "token_ids"}


def test_decoded_columns_are_kept_up_to_a_bound(heavy: tuple[Path, pa.Table]) -> None:
    place, rows = heavy
    with open_store(place, read_only=True) as store:
        store._reader._cold._cache_bytes = 4 << 20
        assert store.table("rollouts") == rows
        kept = store._reader._cold._kept
        assert sum(array.nbytes for array in kept.values()) == store._reader._cold._kept_bytes
        # a column of one row group may be larger than the bound, two are not
        assert len(kept) == 1 or store._reader._cold._kept_bytes <= 4 << 20


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_flipped_byte_in_a_row_group_is_found_and_hurts_nothing_else(
    heavy: tuple[Path, pa.Table], tmp_path: Path
) -> None:
    shutil.copytree(heavy[0], tmp_path / "store")
    with open_store(tmp_path / "store", read_only=True) as store:
        (file,) = store.cold_files("rollouts").files
    described = pq.read_metadata(file.path)
    assert described.num_row_groups >= 2
    at = [described.row_group(1).column(leaf).path_in_schema for leaf in range(described.num_columns)]
    leaf = described.row_group(1).column(at.index("token_ids.list.element"))
    flip(file.path, leaf.data_page_offset + leaf.total_compressed_size // 2)
    first = described.row_group(0).num_rows
    with open_store(tmp_path / "store", read_only=True) as store:
        good = [f"x{number}" for number in range(first - 32)]
        assert store.fetch(good) == heavy[1].slice(0, len(good))
        with pytest.raises(CorruptSegmentError, match=r"column token_ids of row group 1 .*bytes have changed"):
            store.fetch(["x1599"])
        other = [name for name in TABLES["rollouts"].schema.names if name != "token_ids"]
        assert store.fetch(["x1599"], columns=other) == heavy[1].slice(1599, 1).select(other)
        findings = store.verify()
        assert {finding.kind for finding in findings} == {"checksum"}
        # only frames of the damaged row group
        last = first + described.row_group(1).num_rows
        starts = sorted(int(finding.where.rpartition("@")[2]) for finding in findings)
        assert starts == [start for start in range(0, 1600, 32) if start < last and start + 32 > first]


def test_a_damaged_footer_or_a_cut_file_is_found(heavy: tuple[Path, pa.Table], tmp_path: Path) -> None:
    for number, damage in enumerate(("flip", "cut")):
        place = tmp_path / str(number)
        shutil.copytree(heavy[0], place)
        with open_store(place, read_only=True) as store:
            (file,) = store.cold_files("rollouts").files
        if damage == "flip":
            flip(file.path, file.path.stat().st_size - 100)
        else:
            data = file.path.read_bytes()
            file.path.write_bytes(data[: len(data) - 10])
        with (
            open_store(place, read_only=True) as store,
            pytest.raises(CorruptSegmentError, match="footer at the end of the file has changed"),
        ):
            store.fetch(["x0"])


def test_a_damaged_frame_stays_where_it_is_and_the_others_are_compacted(folder: Path) -> None:
    with sqlite3.connect(folder / "catalog.sqlite") as catalog:
        name, offset = catalog.execute(
            "SELECT name, offset FROM frames JOIN segments USING (segment_id) WHERE frames.tbl = 'decisions' "
            "ORDER BY frame_id LIMIT 1 OFFSET 40"
        ).fetchone()
    flip(folder / "segments" / name, offset + 200)
    with open_store(folder, durability="process") as store:
        done = store.compact(everything=True, grace_seconds=0)
        (message,) = done.damaged
        assert "bytes have changed" in message
        assert formats(folder, "decisions") == {"parquet": 636, "arrows": 4}
        assert name in on_disk(folder, ".arrows")
        found = store.cold_files("decisions")
        # the order of commit is kept: a file before the damaged frame, and one after it
        assert [file.rows for file in found.files] == [160, 476]
        assert found.files[0].last_frame < found.frames[0].frame_id < found.files[1].first_frame
        assert [finding.kind for finding in store.verify()] == ["checksum"]


def test_small_files_are_merged_so_that_a_table_has_few_and_rows_move_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer_engine.store.merging.FEWEST_FRAMES", 1)
    with open_store(tmp_path / "store", durability="process") as store:
        moved = 0
        for number in range(48):
            store.append("rollouts", rollouts(range(4 * number, 4 * number + 4), partition="eval"))
            moved += store.compact(grace_seconds=0, tables=["rollouts"]).rows
        # three files, and what comes fourth takes them in: each of the 192 rows moved up to (1 + 48 / 3) / 2 times
        assert len(store.cold_files("rollouts").files) <= 3
        assert len(on_disk(tmp_path / "store", ".parquet")) <= 3
        assert moved < 192 * 9
        assert store.table("rollouts").num_rows == 192
        assert store.verify() == []
        store.compact(everything=True, grace_seconds=0)
        store.append("rollouts", rollouts(range(900, 904), partition="eval"))
        store.compact(everything=True, grace_seconds=0)
        assert len(store.cold_files("rollouts").files) == 1


def test_a_frame_larger_than_a_row_group_is_read_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer_engine.store.parquet.ROW_GROUP_ROWS", 100)
    with open_store(tmp_path / "store", durability="process") as store:
        store.append("rollouts", rollouts(range(250)))
        store.append("rollouts", rollouts(range(250, 260)))
        store.compact(everything=True)
        assert pq.read_metadata(store.cold_files("rollouts").files[0].path).num_row_groups == 3
        assert store.fetch(["x99", "x100", "x249", "x250"]) == rollouts([99, 100, 249, 250])
        assert store.table("rollouts") == rollouts(range(260))
        assert store.verify() == []
