"""The quick paths of append and read: they must say exactly what the slow ones say.

Arrays as other programs make them (sliced, with bytes hidden under a null, with lists that skip elements) go through
the functions that read buffers directly, and keys that the append does not look up must still never be stored twice.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from backends import open_store
from hypothesis import given, settings
from hypothesis import strategies as st
from store_rows import decision, rollout, rollouts, score, table, task

from buffer_engine.errors import BufferEngineError, KeyConflictError, PartitionError, SchemaError
from buffer_engine.schema import TABLES
from buffer_engine.store import LocalStore
from buffer_engine.store.buffers import elements_of, offsets_of, valid_of, values_of
from buffer_engine.store.conform import Misfit, fit
from buffer_engine.store.content import row_hashes
from buffer_engine.store.objects import ObjectFiles


def hashes(rows: pa.Table) -> list[bytes]:
    (batch,) = rows.combine_chunks().to_batches()
    return row_hashes(TABLES["rollouts"], batch)


def with_column(rows: pa.Table, name: str, column: pa.Array) -> pa.Table:
    return rows.set_column(rows.column_names.index(name), rows.schema.field(name), column)


def scores(names: list[str], **changes: Any) -> pa.Table:
    return table("scores", [score(name, **changes) for name in names])


# --- buffers ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.none() | st.lists(st.none() | st.integers(-5, 5), max_size=4), max_size=20),
    st.integers(0, 20),
    st.integers(0, 20),
)
def test_views_of_a_sliced_list_array_are_its_python_values(
    rows: list[list[int | None] | None], start: int, count: int
) -> None:
    array = pa.array(rows, pa.list_(pa.int32())).slice(start, count)
    wanted = rows[start : start + count]
    elements, bounds = elements_of(array)
    flat = [one for row in wanted if row is not None for one in row]
    assert elements.to_pylist() == flat
    assert bounds.tolist() == [sum(len(row or []) for row in wanted[:at]) for at in range(len(wanted) + 1)]
    valid = valid_of(elements)
    kept = np.ones(len(elements), dtype=np.uint8) if valid is None else valid
    assert [int(value) if mark else None for value, mark in zip(values_of(elements), kept, strict=True)] == flat


@given(st.lists(st.none() | st.booleans(), max_size=40), st.integers(0, 40), st.integers(0, 40))
def test_views_of_a_sliced_bool_array_are_its_python_values(rows: list[bool | None], start: int, count: int) -> None:
    array = pa.array(rows, pa.bool_()).slice(start, count)
    wanted = rows[start : start + count]
    valid = valid_of(array)
    marks = [True] * len(wanted) if valid is None else valid.tolist()
    assert [bool(one) if mark else None for one, mark in zip(values_of(array), marks, strict=True)] == wanted


def test_offsets_of_an_array_without_rows_is_one_zero() -> None:
    assert offsets_of(pa.array([], pa.string())).tolist() == [0]
    assert offsets_of(pa.array(["ab", "c"]).slice(2)).tolist() == [3]


# --- what lies under a null changes nothing --------------------------------------------------------------------------


def test_a_hash_ignores_bytes_hidden_under_nulls() -> None:
    plain = table("rollouts", [rollout(0, logprobs=None, error=None), rollout(1)])
    hidden_list = pa.ListArray.from_arrays(
        pa.array([0, 3, 7], pa.int32()),
        pa.array(
            [9.0, float("nan"), 9.0, 8.0, 8.0, -0.5, -0.25],
            pa.float32(),
            mask=np.array([False, False, False, True, True, False, False]),
        ),
        mask=pa.array([True, False]),
    )
    valid = pa.array([False, True]).buffers()[1]
    text = pa.py_buffer(b"secretx")
    hidden_text = pa.Array.from_buffers(
        pa.string(), 2, [valid, pa.py_buffer(np.array([0, 6, 7], dtype=np.int32)), text]
    )
    assert hidden_text.to_pylist() == [None, "x"]
    given_rows = with_column(plain, "logprobs", hidden_list)
    assert given_rows.to_pylist() == plain.to_pylist()
    assert hashes(given_rows) == hashes(plain)
    with_error = table("rollouts", [rollout(0, logprobs=None, error=None), rollout(1, error="x")])
    assert hashes(with_column(given_rows, "error", hidden_text)) == hashes(with_error)


def test_not_a_number_under_a_null_is_taken_and_elsewhere_refused() -> None:
    kind = pa.list_(pa.float32())
    values = np.array([np.nan, 1.0, np.inf], dtype=np.float32)
    under = pa.ListArray.from_arrays(
        pa.array([0, 2, 3], pa.int32()), pa.array(values, mask=np.array([True, False, True]))
    )
    assert fit(under, kind).to_pylist() == [[None, 1.0], [None]]
    for mask in ([False, False, True], [True, False, False]):
        wrong = pa.ListArray.from_arrays(pa.array([0, 2, 3], pa.int32()), pa.array(values, mask=np.array(mask)))
        with pytest.raises(Misfit, match="finite"):
            fit(wrong, kind)
    skipped = under.slice(1)  # the elements of the first list are no part of this array
    assert fit(skipped, kind).to_pylist() == [[None]]


def test_a_null_in_a_list_of_integers_is_refused_only_where_it_belongs_to_the_rows() -> None:
    array = pa.array([[1, None], [2, 3]], pa.list_(pa.int32()))
    with pytest.raises(Misfit, match="element of the list is null"):
        fit(array, array.type)
    assert fit(array.slice(1), array.type).to_pylist() == [[2, 3]]


@pytest.mark.usefixtures("backend")
def test_every_row_of_sliced_and_chunked_tables_is_stored_as_it_is(tmp_path: Path) -> None:
    rows = rollouts(range(20))
    chunked = pa.concat_tables([rows.slice(0, 7), rows.slice(7, 1), rows.slice(8)])
    with open_store(tmp_path / "s", durability="process") as store:
        store.append("rollouts", chunked.slice(3, 11))
        assert store.table("rollouts").to_pylist() == rows.slice(3, 11).to_pylist()
        assert store.append("rollouts", rows).appended == {"rollouts": 9}
        assert store.verify() == []


# --- keys that were not looked up ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("backend")
def test_a_repeat_in_the_middle_of_new_scores_is_recognised(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", durability="process") as store:
        store.append("rollouts", rollouts(range(6)))
        store.append("scores", scores(["x2", "x3"]))
        receipt = store.append("scores", scores(["x0", "x1", "x2", "x3", "x4"]), cursors={"late": 5})
        assert (receipt.appended, receipt.unchanged) == ({"scores": 3}, {"scores": 2})
        assert store.cursor("late") == 5
        assert store.table("scores", columns=["experience_id"]).column(0).to_pylist() == ["x2", "x3", "x0", "x1", "x4"]
        assert store.verify() == []


@pytest.mark.usefixtures("backend")
def test_other_content_in_the_middle_of_new_scores_is_a_conflict_and_stores_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", durability="process") as store:
        store.append("rollouts", rollouts(range(6)))
        store.append("scores", scores(["x2"]))
        before = store.version()
        rows = [score("x0"), score("x2", 0.75), score("x4")]
        with pytest.raises(KeyConflictError, match=r"experience_id='x2'.*stored already.*value is 1.0 there and 0.75"):
            store.append("scores", table("scores", rows))
        assert store.version() == before
        assert store.table("scores").num_rows == 1
        assert store.verify() == []


@pytest.mark.usefixtures("backend")
def test_a_whole_repeat_of_scores_writes_no_byte(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", durability="process") as store:
        store.append("rollouts", rollouts(range(50)))
        late = scores([f"x{at}" for at in range(50)])
        store.append("scores", late)
        files = store._files  # pyright: ignore[reportPrivateUsage]
        (segment,) = [name for name in files.names() if name.startswith("scores/")]
        before, version = files.local(segment).read_bytes(), store.version()
        assert store.append("scores", late).unchanged == {"scores": 50}
        assert [name for name in files.names() if name.startswith("scores/")] == [segment]
        assert (files.local(segment).read_bytes(), store.version()) == (before, version)


@pytest.mark.usefixtures("backend")
def test_a_repeat_in_one_of_two_tables_keeps_the_append_whole(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", durability="process") as store:
        store.append("rollouts", rollouts([0, 1]))
        store.append("decisions", table("decisions", [decision("x1", "keep")]))
        verdicts = [decision("x0", "reject"), decision("x1", "keep"), decision("x2", "hold")]
        receipt = store.append_all({"rollouts": rollouts([1, 2]), "decisions": table("decisions", verdicts)})
        assert receipt.appended == {"rollouts": 1, "decisions": 2}
        state = store.rollout_state()
        assert state.column("status").to_pylist() == ["rejected", "kept", "held"]
        assert store.verify() == []


@pytest.mark.usefixtures("backend")
def test_threads_that_write_the_same_scores_store_each_once(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", durability="process") as store:
        store.append("rollouts", rollouts(range(60)))
        appended: list[int] = []

        def write(first: int) -> None:
            for at in range(first, first + 40, 4):
                names = [f"x{one}" for one in range(at, at + 8) if one < 60]
                appended.append(store.append("scores", scores(names)).appended["scores"])

        threads = [threading.Thread(target=write, args=(first,)) for first in (0, 8, 16, 20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(appended) == 60
        assert sorted(store.table("scores").column("experience_id").to_pylist()) == sorted(f"x{at}" for at in range(60))
        assert store.verify() == []


def together(store: LocalStore, *appends: Any) -> list[Any]:
    """Results (or errors) of appends that all wait for the catalog before the first of them is done."""
    results: list[Any] = [None] * len(appends)

    def one(at: int) -> None:
        try:
            results[at] = store.append_all(appends[at])
        except BufferEngineError as error:
            results[at] = error

    threads = [threading.Thread(target=one, args=(at,)) for at in range(len(appends))]
    with store._catalog.lock:  # pyright: ignore[reportPrivateUsage]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 30
        while len(store._appender._queue) < len(appends):  # pyright: ignore[reportPrivateUsage]
            assert time.monotonic() < deadline
            time.sleep(0.001)
    for thread in threads:
        thread.join()
    return results


@pytest.mark.usefixtures("backend")
def test_appends_that_wait_together_share_one_transaction_and_one_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path / "s") as store:
        store.append("rollouts", rollouts([100]))
        version, synced, real, put = store.version(), [], os.fdatasync, ObjectFiles.write
        monkeypatch.setattr(os, "fdatasync", lambda handle: (synced.append(handle), real(handle)))
        monkeypatch.setattr(ObjectFiles, "write", lambda *given: (synced.append(given), put(*given)))
        found = together(store, *({"rollouts": rollouts([2 * at, 2 * at + 1])} for at in range(6)))
        assert [one.appended for one in found] == [{"rollouts": 2}] * 6
        assert {one.version for one in found} == {version + 1} == {store.version()}
        assert len(synced) == 1
        state = store.rollout_state()
        assert sorted(state.column("experience_id").to_pylist()) == sorted([*(f"x{at}" for at in range(12)), "x100"])
        assert store.verify() == []


@pytest.mark.usefixtures("backend")
def test_of_appends_that_wait_together_only_the_wrong_one_fails(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", durability="process") as store:
        store.append("rollouts", rollouts([0, 1]))
        store.append("scores", scores(["x0"]))
        found = together(
            store,
            {"scores": table("scores", [score("x0", 0.25)])},
            {"scores": scores(["x1"])},
            {"scores": scores(["nobody"])},
            {"rollouts": rollouts([2])},
            {"scores": scores(["x0"])},
        )
        assert isinstance(found[0], KeyConflictError)
        assert found[1].appended == {"scores": 1}
        assert isinstance(found[2], SchemaError)
        assert found[3].appended == {"rollouts": 1}
        assert (found[4].appended, found[4].unchanged) == ({"scores": 0}, {"scores": 1})
        assert store.table("scores", columns=["experience_id"]).column(0).to_pylist() == ["x0", "x1"]
        assert store.verify() == []


@pytest.mark.usefixtures("backend")
def test_equal_and_contradicting_rows_that_wait_together_are_stored_once(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", durability="process") as store:
        same = {"rollouts": rollouts([0])}
        other = {"rollouts": rollouts([0], stop_reason="length")}
        found = together(store, same, same, other)
        kinds = sorted(type(one).__name__ for one in found)
        assert kinds.count("KeyConflictError") in (1, 2)  # whichever came first is stored
        assert store.table("rollouts").num_rows == 1
        assert sum(one.appended["rollouts"] for one in found if not isinstance(one, KeyConflictError)) == 1
        assert store.verify() == []


@pytest.mark.usefixtures("backend")
def test_tasks_in_two_partitions_that_wait_together_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", durability="process") as store:
        one, other = (
            {"tasks": table("tasks", [task(name, partition=name, prompt_hash="same")])} for name in ("train", "eval")
        )
        found = together(store, one, other)
        assert sum(isinstance(result, PartitionError) for result in found) == 1
        assert store.table("tasks").num_rows == 1


@pytest.mark.usefixtures("backend")
def test_many_threads_lose_and_double_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", durability="process") as store:

        def write(first: int) -> None:
            for at in range(first, first + 30, 2):
                store.append("rollouts", rollouts([at, at + 1]), cursors={f"writer {first}": at})

        threads = [threading.Thread(target=write, args=(first,)) for first in range(0, 240, 30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ids = store.rollout_state().column("experience_id").to_pylist()
        assert sorted(ids) == sorted(f"x{at}" for at in range(240))
        assert [store.cursor(f"writer {first}") for first in range(0, 240, 30)] == [28 + at for at in range(0, 240, 30)]
        assert store.verify() == []


@pytest.mark.usefixtures("backend")
def test_an_append_inside_a_snapshot_knows_what_was_stored_since(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", durability="process") as store, open_store(tmp_path / "s") as other:
        store.append("rollouts", rollouts(range(4)))
        with store.snapshot():
            other.append("rollouts", rollouts([4, 5]))
            other.append("scores", scores(["x1", "x2"]))
            assert store.append("scores", scores(["x0", "x1", "x3"])).appended == {"scores": 2}
            assert store.append("rollouts", rollouts([5, 6])).appended == {"rollouts": 1}
            assert store.append("scores", scores(["x4"])).appended == {"scores": 1}
        assert store.verify() == []


@pytest.mark.usefixtures("backend")
def test_a_score_about_nothing_is_named_among_many(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", durability="process") as store:
        store.append("rollouts", rollouts(range(5)))
        with pytest.raises(SchemaError, match=r"experience_id='x7' is not a stored rollout \(2 such id\(s\)\)"):
            store.append("scores", scores(["x0", "x7", "x4", "x8"]))


# --- reading by place ------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(order=st.lists(st.integers(0, 11), max_size=30))
def test_fetch_gives_rows_in_the_order_asked_repeats_included(order: list[int]) -> None:
    names = [f"x{at}" for at in order]
    found = SHARED.fetch(names)
    assert found.to_pylist() == [STORED[at] for at in order]
    assert found.schema.equals(TABLES["rollouts"].schema, check_metadata=True)
    narrow = SHARED.fetch(names, columns=["logprobs", "experience_id"])
    assert narrow.column_names == ["logprobs", "experience_id"]
    assert narrow.column("experience_id").to_pylist() == names
    assert narrow.column("logprobs").to_pylist() == [STORED[at]["logprobs"] for at in order]


@pytest.fixture(scope="module", autouse=True)
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Twelve rollouts in three frames, for the test above (hypothesis wants no fixture of its own)."""
    rows = [rollout(at, logprobs=None if at % 5 == 0 else [None, None, -0.5, -0.25 * at]) for at in range(12)]
    with open_store(tmp_path_factory.mktemp("shared") / "s", durability="process") as store:
        for at in (0, 4, 8):
            store.append("rollouts", table("rollouts", rows[at : at + 4]))
        globals().update(SHARED=store, STORED=rows)
        yield


SHARED: Any = None
STORED: list[dict[str, Any]] = []
