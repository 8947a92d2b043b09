"""From reservation to commit: the manifest first, every row counted once, nothing lost in between."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from backends import open_store
from store_rows import decisions, manifest, model, rollouts

from buffer_engine.errors import KeyConflictError, SchemaError, StoreError
from buffer_engine.store import LocalStore
from buffer_engine.store.base import BatchRecord, ReadPolicy, Reservation

pytestmark = pytest.mark.usefixtures("backend")


@pytest.fixture
def store(tmp_path: Path):
    with open_store(tmp_path / "s", durability="process") as opened:
        opened.append_all({"rollouts": rollouts(range(6)), "decisions": decisions(range(6))})
        yield opened


def reserve(store: LocalStore, batch_id: str = "b1", rows: int = 4, lease: float = 60.0) -> Reservation:
    found = store.reserve(ReadPolicy(rows=rows), run_id="run", batch_id=batch_id, model_version=0, lease_seconds=lease)
    assert found is not None
    return found


def prepare(store: LocalStore, reservation: Reservation, step: int = 1, ids: list[str] | None = None) -> None:
    batch, rows = manifest(reservation.batch_id, step, reservation.experience_ids if ids is None else ids)
    store.prepare_batch(reservation, step=step, batch=batch, rows=rows)


def states(store: LocalStore) -> list[tuple[int, str | None, int | None]]:
    table = store.rollout_state()
    return list(zip(*(table.column(name).to_pylist() for name in ("uses", "reserved_by", "trained_step")), strict=True))


def test_a_committed_batch_counts_each_row_once_and_stores_its_model(store: LocalStore) -> None:
    prepare(store, reserve(store))
    assert states(store)[:5] == [(0, "b1", None)] * 4 + [(0, None, None)]
    store.commit_batch("b1", step=1, model=model(1))
    assert states(store) == [(1, None, 1)] * 4 + [(0, None, None)] * 2
    assert store.table("models", columns=["version"]).column(0).to_pylist() == [1]
    assert store.table("batch_rows").num_rows == 4
    row = store.batch_state().to_pylist()[0]
    assert (row["status"], row["step"], row["rows"]) == ("committed", 1, 4)
    assert row["committed_at"] >= row["reserved_at"]
    assert store.verify() == []


def test_committing_again_changes_nothing(store: LocalStore) -> None:
    prepare(store, reserve(store))
    store.commit_batch("b1", step=1, model=model(1))
    version = store.version()
    store.commit_batch("b1", step=1, model=model(1))
    store.commit_batch("b1", step=1)
    assert store.version() == version
    assert states(store)[0] == (1, None, 1)


def test_preparing_again_with_the_same_content_changes_nothing(store: LocalStore) -> None:
    reservation = reserve(store)
    prepare(store, reservation)
    prepare(store, reservation)
    assert (store.table("batches").num_rows, store.table("batch_rows").num_rows) == (1, 4)
    store.commit_batch("b1", step=1)
    prepare(store, reservation)
    assert store.batches("run") == [BatchRecord("b1", "run", "committed", 1, 4)]
    assert store.verify() == []


def test_preparing_again_with_other_content_is_refused(store: LocalStore) -> None:
    reservation = reserve(store)
    prepare(store, reservation)
    batch, rows = manifest("b1", 1, reservation.experience_ids, rng_json='{"seed": 2}')
    with pytest.raises(KeyConflictError, match=r"batches: batch_id='b1'.*rng_json"):
        store.prepare_batch(reservation, step=1, batch=batch, rows=rows)


def test_rows_reserved_and_not_used_are_free_again(store: LocalStore) -> None:
    prepare(store, reserve(store), ids=["x2", "x3"])
    assert reserve(store, "b2", rows=4).experience_ids == ("x0", "x1", "x4", "x5")
    store.commit_batch("b1", step=1)
    assert [state[0] for state in states(store)] == [0, 0, 1, 1, 0, 0]
    assert store.verify() == []


def test_a_manifest_may_only_hold_reserved_rows_each_once(store: LocalStore) -> None:
    reservation = reserve(store)
    with pytest.raises(StoreError, match="'x5' is not reserved"):
        prepare(store, reservation, ids=["x0", "x5"])
    with pytest.raises(StoreError, match="'x0' occurs twice"):
        prepare(store, reservation, ids=["x0", "x1", "x0"])
    with pytest.raises(SchemaError, match="x77"):
        prepare(store, reservation, ids=["x77"])
    assert store.table("batches").num_rows == 0
    assert [record.status for record in store.batches("run")] == ["reserved"]
    assert [state[1] for state in states(store)] == ["b1"] * 4 + [None] * 2


def test_the_manifest_must_be_about_this_batch_and_step(store: LocalStore) -> None:
    reservation = reserve(store)
    batch, rows = manifest("b2", 1, reservation.experience_ids)
    with pytest.raises(StoreError, match="batch_id"):
        store.prepare_batch(reservation, step=1, batch=batch, rows=rows)
    batch, rows = manifest("b1", 2, reservation.experience_ids)
    with pytest.raises(StoreError, match="step 1"):
        store.prepare_batch(reservation, step=1, batch=batch, rows=rows)
    with pytest.raises(StoreError, match="exactly one row"):
        store.prepare_batch(reservation, step=2, batch=pa.concat_tables([batch, batch]), rows=rows)


def test_an_expired_or_released_reservation_cannot_be_prepared(store: LocalStore) -> None:
    with pytest.raises(StoreError, match="expired"):
        prepare(store, reserve(store, lease=0.0))
    reservation = reserve(store, "b2")
    store.release("b2")
    with pytest.raises(StoreError, match="released"):
        prepare(store, reservation)
    assert store.table("batches").num_rows == 0


def test_only_a_prepared_batch_can_be_committed_and_only_at_its_step(store: LocalStore) -> None:
    with pytest.raises(StoreError, match="'b1' is unknown"):
        store.commit_batch("b1", step=1)
    reservation = reserve(store)
    with pytest.raises(StoreError, match="'b1' is reserved"):
        store.commit_batch("b1", step=1)
    prepare(store, reservation)
    with pytest.raises(StoreError, match="for step 1, not 2"):
        store.commit_batch("b1", step=2)
    store.commit_batch("b1", step=1)
    with pytest.raises(StoreError, match="for step 1, not 2"):
        store.commit_batch("b1", step=2)
    with pytest.raises(StoreError, match="committed at step 1"):
        store.release("b1")


def test_a_released_batch_gives_its_rows_back_and_its_manifest_keeps_its_id(store: LocalStore) -> None:
    reservation = reserve(store)
    store.release("b1")
    store.release("b1")
    assert reserve(store, "b1").experience_ids == reservation.experience_ids  # no manifest: the id is free
    prepare(store, reservation)
    store.release("b1")
    with pytest.raises(StoreError, match=r"'b1' is released and has a manifest for step 1.*new id"):
        reserve(store, "b1")
    prepare(store, reserve(store, "b1-again"))
    store.commit_batch("b1-again", step=1)
    assert [state[0] for state in states(store)] == [1, 1, 1, 1, 0, 0]
    assert store.verify() == []


def test_a_prepared_batch_survives_a_reopening_and_is_replayed(tmp_path: Path) -> None:
    with open_store(tmp_path / "r") as store:
        store.append_all({"rollouts": rollouts(range(4)), "decisions": decisions(range(4))})
        prepare(store, reserve(store, rows=2))
        reserve(store, "b2", rows=2)
    with open_store(tmp_path / "r") as store, store.open_run("run"):
        assert store.batches("run") == [
            BatchRecord("b1", "run", "prepared", 1, 2), BatchRecord("b2", "run", "released", None, 2),
        ]  # fmt: skip
        store.commit_batch("b1", step=1, model=model(1))
        assert reserve(store, "b3", rows=4).experience_ids == ("x2", "x3")


def test_batches_are_listed_by_step_with_unprepared_ones_last(store: LocalStore) -> None:
    first, second = reserve(store, "b9", rows=2), reserve(store, "b1", rows=2)
    reserve(store, "b0", rows=2)
    prepare(store, second, step=1)
    prepare(store, first, step=2)
    assert [(one.batch_id, one.step) for one in store.batches("run")] == [("b1", 1), ("b9", 2), ("b0", None)]
    assert store.batches("nobody") == []


def test_a_failing_model_row_leaves_the_batch_uncommitted(store: LocalStore) -> None:
    prepare(store, reserve(store))
    with pytest.raises(SchemaError):
        store.commit_batch("b1", step=1, model=model(1).drop_columns(["config_hash"]))
    assert store.batches("run")[0].status == "prepared"
    assert states(store)[0] == (0, "b1", None)
