"""What an append promises: all or nothing, once, and unchanged."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from backends import open_store
from store_rows import decision, decisions, manifest, rollout, rollouts, score, table, task

from buffer_engine.errors import KeyConflictError, PartitionError, SchemaError, StoreError
from buffer_engine.schema import TABLES
from buffer_engine.store import LocalStore
from buffer_engine.store.base import ReadPolicy

pytestmark = pytest.mark.usefixtures("backend")

LATER = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path):
    with open_store(tmp_path / "store") as opened:
        yield opened


def ids(store: LocalStore) -> list[str]:
    return store.table("rollouts", columns=["experience_id"]).column(0).to_pylist()


def test_rows_come_back_as_they_were_given_after_reopening(tmp_path: Path) -> None:
    given = rollouts(range(5))
    with open_store(tmp_path / "s") as store:
        receipt = store.append("rollouts", given)
        assert (receipt.version, dict(receipt.appended), dict(receipt.unchanged)) == (
            1,
            {"rollouts": 5},
            {"rollouts": 0},
        )
    with open_store(tmp_path / "s") as store:
        assert store.table("rollouts").to_pylist() == given.to_pylist()
        assert store.table("rollouts").schema.equals(TABLES["rollouts"].schema, check_metadata=True)


def test_writing_the_same_rows_again_changes_nothing(store: LocalStore) -> None:
    store.append("rollouts", rollouts(range(3)))
    again = store.append("rollouts", rollouts(range(3), created_at=LATER))
    assert (again.version, dict(again.appended), dict(again.unchanged)) == (1, {"rollouts": 0}, {"rollouts": 3})
    assert store.version() == 1
    assert store.table("rollouts").num_rows == 3


def test_only_the_new_rows_of_a_half_repeated_append_are_written(store: LocalStore) -> None:
    store.append("rollouts", rollouts([0, 1]))
    receipt = store.append("rollouts", rollouts([1, 2, 0, 3]))
    assert (dict(receipt.appended), dict(receipt.unchanged)) == ({"rollouts": 2}, {"rollouts": 2})
    assert ids(store) == ["x0", "x1", "x2", "x3"]
    assert store.verify() == []


def test_a_repeat_inside_one_call_is_stored_once(store: LocalStore) -> None:
    receipt = store.append("rollouts", rollouts([0, 1, 0]))
    assert (receipt.appended["rollouts"], receipt.unchanged["rollouts"]) == (2, 1)
    assert ids(store) == ["x0", "x1"]


def test_other_content_under_a_stored_key_is_refused_with_key_and_first_differing_column(store: LocalStore) -> None:
    store.append("rollouts", rollouts([0, 1]))
    changed = table("rollouts", [rollout(7), rollout(1, token_ids=[9, 9, 9, 9], stop_reason="length")])
    with pytest.raises(KeyConflictError, match=r"experience_id='x1'.*token_ids is \[1, 2, 3, 4\].*\[9, 9, 9, 9\]"):
        store.append("rollouts", changed)
    assert ids(store) == ["x0", "x1"]
    assert store.version() == 1


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("error", "boom: x"), ("model_version", None), ("model_version", 1), ("truncated", True),
        ("logprobs", [None, -0.5, None, -0.25]), ("logprobs", None), ("token_versions", []),
        ("messages", []), ("sampling", None), ("info_json", ""), ("parent_id", ""),
        ("loss_mask", [False, True, False, True]), ("explore_step", 2),
    ],
)  # fmt: skip
def test_a_change_in_any_single_field_is_a_conflict(store: LocalStore, column: str, value: object) -> None:
    store.append("rollouts", rollouts([0]))
    with pytest.raises(KeyConflictError, match=f"{column} is "):
        store.append("rollouts", table("rollouts", [rollout(0, **{column: value})]))


def test_two_contents_for_one_key_in_one_call_are_refused(store: LocalStore) -> None:
    twice = table("rollouts", [rollout(0), rollout(0, stop_reason="length")])
    with pytest.raises(KeyConflictError, match=r"x0.*twice in one append.*stop_reason is 'eos' there and 'length'"):
        store.append("rollouts", twice)
    assert store.version() == 0


def test_several_tables_and_cursors_move_in_one_version(store: LocalStore) -> None:
    receipt = store.append_all(
        {"decisions": decisions([0]), "rollouts": rollouts([0, 1]), "scores": table("scores", [score("x1")])},
        cursors={"made": 2, "seen": 5},
    )
    assert receipt.version == store.version() == 1
    assert (store.cursor("made"), store.cursor("seen"), store.cursor("never")) == (2, 5, 0)
    assert store.rollout_state().column("status").to_pylist() == ["kept", "new"]


def test_a_refused_table_stops_the_others_and_the_cursors(store: LocalStore) -> None:
    bad = table("scores", [score("x0", float("nan"))])
    with pytest.raises(SchemaError, match="value"):
        store.append_all({"rollouts": rollouts([0]), "scores": bad}, cursors={"made": 1})
    assert (store.version(), store.cursor("made"), store.table("rollouts").num_rows) == (0, 0, 0)


def test_a_cursor_moves_without_rows_and_counts_as_a_version_only_when_it_moves(store: LocalStore) -> None:
    assert store.append_all({}, cursors={"c": 3}).version == 1
    assert store.append_all({}, cursors={"c": 3}).version == 1
    assert store.append_all({}, cursors={"c": 2}).version == 2
    assert store.cursor("c") == 2


def test_a_repeat_still_moves_its_cursor(store: LocalStore) -> None:
    store.append("rollouts", rollouts([0]), cursors={"c": 1})
    receipt = store.append("rollouts", rollouts([0]), cursors={"c": 2})
    assert (receipt.version, receipt.unchanged["rollouts"], store.cursor("c")) == (2, 1, 2)


def test_scans_return_what_came_between_two_versions_in_commit_order(store: LocalStore) -> None:
    for number in range(4):
        store.append("rollouts", rollouts([number]))
    batches = list(store.scan("rollouts", after=1, until=3, columns=["experience_id"]))
    assert [batch.column(0).to_pylist() for batch in batches] == [["x1"], ["x2"]]
    assert store.table("rollouts", until=2).num_rows == 2
    assert store.table("scores").num_rows == 0
    assert store.table("scores", columns=["value", "name"]).column_names == ["value", "name"]


def test_fetch_keeps_the_order_asked_across_frames_and_repeats(store: LocalStore) -> None:
    store.append("rollouts", rollouts(range(4)))
    store.append("rollouts", rollouts(range(4, 8)))
    wanted = ["x5", "x1", "x2", "x7", "x1", "x0"]
    assert store.fetch(wanted, columns=["experience_id", "token_ids"]).to_pylist() == [
        {"experience_id": one, "token_ids": [int(one[1:]), 2, 3, 4]} for one in wanted
    ]
    assert store.fetch([]).num_rows == 0
    with pytest.raises(StoreError, match="x99"):
        store.fetch(["x0", "x99"])
    with pytest.raises(SchemaError, match=r"token_idz.*token_ids"):
        store.fetch(["x0"], columns=["token_idz"])


def test_narrow_finds_late_rows_about_the_asked_rollouts_only(store: LocalStore) -> None:
    store.append("rollouts", rollouts(range(3)))
    store.append("scores", table("scores", [score("x0"), score("x1"), score("x2")]))
    store.append("scores", table("scores", [score("x1", None, version=2), score("x0", 0.0, name="style")]))
    found = store.narrow("scores", ["x1", "x0"]).select(["experience_id", "name", "version", "value"]).to_pylist()
    assert [tuple(row.values()) for row in found] == [
        ("x0", "answer", 1, 1.0), ("x1", "answer", 1, 1.0), ("x1", "answer", 2, None), ("x0", "style", 1, 0.0),
    ]  # fmt: skip
    assert store.narrow("decisions", ["x1"]).num_rows == 0


def test_verdicts_move_the_status_and_a_repeated_one_does_not_move_it_back(store: LocalStore) -> None:
    store.append("rollouts", rollouts(range(5)))
    verdicts = ["keep", "reject", "hold", "mask"]
    store.append("decisions", table("decisions", [decision(f"x{at}", one) for at, one in enumerate(verdicts)]))
    assert store.rollout_state().column("status").to_pylist() == ["kept", "rejected", "held", "new", "new"]
    store.append("decisions", table("decisions", [decision("x2", "release", pass_id="p2"), decision("x0", "reject")]))
    assert store.rollout_state().column("status").to_pylist() == ["rejected", "rejected", "new", "new", "new"]
    store.append("decisions", decisions([0], "keep"))
    assert store.rollout_state(status="rejected").column("experience_id").to_pylist() == ["x0", "x1"]
    assert store.verify() == []


def test_of_two_verdicts_in_one_call_the_later_counts(store: LocalStore) -> None:
    store.append("rollouts", rollouts([0]))
    both = [decision("x0", "keep"), decision("x0", "hold", operator="people")]
    store.append("decisions", table("decisions", both))
    assert store.rollout_state().column("status").to_pylist() == ["held"]


@pytest.mark.parametrize("name", ["scores", "decisions"])
def test_a_row_about_an_unknown_rollout_is_refused(store: LocalStore, name: str) -> None:
    row = score("x9") if name == "scores" else decision("x9")
    with pytest.raises(SchemaError, match="x9"):
        store.append(name, table(name, [row]))
    store.append_all({name: table(name, [row]), "rollouts": rollouts([9])})
    assert store.verify() == []


def test_a_prompt_may_not_be_in_both_partitions(store: LocalStore) -> None:
    store.append("tasks", table("tasks", [task("a", prompt_hash="same")]))
    twin = task("b", prompt_hash="same", partition="eval")
    with pytest.raises(PartitionError, match=r"'b' \(eval\).*'a' \(train\)"):
        store.append("tasks", table("tasks", [twin]))
    with pytest.raises(PartitionError, match="'d'"):
        store.append(
            "tasks", table("tasks", [task("c", prompt_hash="new"), task("d", prompt_hash="new", partition="eval")])
        )
    store.append("tasks", table("tasks", [task("e", prompt_hash="same")]))
    assert store.table("tasks", columns=["task_id"]).column(0).to_pylist() == ["a", "e"]


def test_a_rollout_belongs_to_the_partition_of_its_task(store: LocalStore) -> None:
    store.append("tasks", table("tasks", [task("t0", partition="eval")]))
    with pytest.raises(PartitionError, match=r"x0.*'train'.*'t0'.*'eval'"):
        store.append("rollouts", rollouts([0]))
    with pytest.raises(PartitionError, match="x2"):
        store.append_all({"rollouts": rollouts([2], partition="eval"), "tasks": table("tasks", [task("t1")])})
    store.append("rollouts", rollouts([0], partition="eval"))


def test_columns_may_come_in_any_order_and_nullable_ones_may_be_missing(store: LocalStore) -> None:
    given = rollouts([0])
    few = given.drop_columns(["parent_id", "error", "logprobs"])
    store.append("rollouts", few.select(sorted(few.column_names)))
    row = store.table("rollouts").to_pylist()[0]
    assert (row["logprobs"], row["error"]) == (None, None)
    assert list(row) == TABLES["rollouts"].schema.names
    # a missing column and an explicit null are the same content
    assert store.append("rollouts", table("rollouts", [rollout(0, logprobs=None)])).unchanged == {"rollouts": 1}


def test_tables_without_a_key_keep_every_row(store: LocalStore) -> None:
    row = {"run_id": "run", "step": 1, "name": "loss", "value": None, "recorded_at": LATER}
    for _ in range(2):
        store.append("metrics", table("metrics", [row, row]))
    assert store.table("metrics").num_rows == 4
    assert store.verify() == []


def test_an_append_of_many_rows_is_several_frames_and_one_version(store: LocalStore, monkeypatch) -> None:
    monkeypatch.setattr("buffer_engine.store.validate.FRAME_ROWS", 10)
    store.append("rollouts", pa.concat_tables([rollouts(range(7)), rollouts(range(7, 35))]))
    assert [batch.num_rows for batch in store.scan("rollouts")] == [10, 10, 10, 5]
    assert ids(store) == [f"x{number}" for number in range(35)]
    assert store.version() == 1
    with pytest.raises(KeyConflictError, match="x3"):  # the same key in two frames of one append
        store.append("rollouts", pa.concat_tables([rollouts([3]), rollouts(range(40, 55)), rollouts([3], attempt=1)]))


def test_an_empty_append_changes_nothing(store: LocalStore) -> None:
    receipt = store.append("rollouts", rollouts([]))
    assert (receipt.version, receipt.appended["rollouts"]) == (0, 0)


def test_threads_may_share_a_store(store: LocalStore) -> None:
    failures: list[BaseException] = []

    def write(worker: int) -> None:
        try:
            for number in range(10):
                store.append("rollouts", rollouts([100 * worker + number]))
                assert store.fetch([f"x{100 * worker + number}"]).num_rows == 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(worker,)) for worker in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(ids(store)) == sorted(f"x{100 * worker + number}" for worker in range(1, 5) for number in range(10))
    assert store.version() <= 40  # appends that wait together share a transaction
    assert store.rollout_state().column("sequence").to_pylist() == list(range(1, 41))


def test_a_snapshot_holds_still_while_others_write(store: LocalStore) -> None:
    store.append("rollouts", rollouts([0]))
    with store.snapshot() as version, open_store(store.path) as other:
        other.append("rollouts", rollouts([1]))
        assert (version, store.version(), store.rollout_state().num_rows) == (1, 1, 1)
    assert (store.version(), store.rollout_state().num_rows) == (2, 2)


def test_info_counts_rows_bytes_and_runs(store: LocalStore) -> None:
    store.append("rollouts", rollouts([0, 1, 2], run_id="b"))
    store.append("rollouts", rollouts([3], run_id="a"))
    info = store.info()
    assert (dict(info.rows), info.runs, info.version, info.durability) == ({"rollouts": 4}, ("a", "b"), 2, "power")
    assert info.bytes["rollouts"] > 1000


def test_tasks_and_manifests_are_read_by_id(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.append("tasks", table("tasks", [task(f"t{number}") for number in range(4)]))
        store.append("rollouts", rollouts(range(4)))
        store.append("decisions", decisions(range(4)))
        for step in (1, 2):
            held = store.reserve(ReadPolicy(rows=2), run_id="run", batch_id=f"b{step}", model_version=step - 1)
            assert held is not None
            batch, rows = manifest(f"b{step}", step, held.experience_ids)
            store.prepare_batch(held, step=step, batch=batch, rows=rows)
            store.commit_batch(f"b{step}", step=step)
        assert store.narrow("tasks", ["t3", "t1", "absent"]).column("task_id").to_pylist() == ["t1", "t3"]
        assert store.narrow("batches", ["b2"]).column("step").to_pylist() == [2]
        assert store.narrow("batch_rows", ["b2"]).column("experience_id").to_pylist() == ["x2", "x3"]
        assert store.narrow("batches", ["absent"]).num_rows == 0
        with pytest.raises(SchemaError, match="narrow does not read 'metrics'"):
            store.narrow("metrics", ["run"])
