"""Which rows a batch gets: whole groups, in order of arrival, never held, failed, stale or taken ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from backends import examples, open_store
from hypothesis import given, settings
from hypothesis import strategies as st
from store_rows import decision, decisions, manifest, rollout, rollouts, table

from buffer_engine.errors import StoreError
from buffer_engine.store import LocalStore
from buffer_engine.store.base import ReadPolicy, Reservation

pytestmark = pytest.mark.usefixtures("backend")


@pytest.fixture
def store(tmp_path: Path):
    with open_store(tmp_path / "s", durability="process") as opened:
        yield opened


def reserve(store: LocalStore, batch_id: str = "b1", *, version: int = 0, **policy: Any) -> Reservation | None:
    lease = policy.pop("lease", 60.0)
    run_id = policy.pop("run_id", "run")
    return store.reserve(
        ReadPolicy(**policy), run_id=run_id, batch_id=batch_id, model_version=version, lease_seconds=lease
    )


def taken(store: LocalStore, batch_id: str = "b1", **policy: Any) -> list[str]:
    found = reserve(store, batch_id, **policy)
    return [] if found is None else list(found.experience_ids)


def kept(store: LocalStore, numbers: list[int], **changes: Any) -> None:
    store.append_all({"rollouts": rollouts(numbers, **changes), "decisions": decisions(numbers)})


def train(store: LocalStore, batch_id: str, step: int, **policy: Any) -> list[str]:
    reservation = reserve(store, batch_id, version=step - 1, **policy)
    if reservation is None:
        return []
    batch, rows = manifest(batch_id, step, reservation.experience_ids)
    store.prepare_batch(reservation, step=step, batch=batch, rows=rows)
    store.commit_batch(batch_id, step=step)
    return list(reservation.experience_ids)


def test_groups_come_whole_in_the_order_of_their_first_row(store: LocalStore) -> None:
    # arrival: first row of g1, then g0 whole, then the second row of g1
    kept(store, [3, 0, 1, 2])
    assert taken(store, rows=3) == ["x2", "x3"]  # g1 arrived first; inside a group the sample index orders
    assert taken(store, "b2", rows=3) == ["x0", "x1"]
    assert taken(store, "b3", rows=3) == []
    assert store.rollout_state().select(["experience_id", "reserved_by"]).to_pylist() == [
        {"experience_id": "x3", "reserved_by": "b1"}, {"experience_id": "x0", "reserved_by": "b2"},
        {"experience_id": "x1", "reserved_by": "b2"}, {"experience_id": "x2", "reserved_by": "b1"},
    ]  # fmt: skip


def test_a_group_that_would_exceed_the_batch_waits_for_the_next_one(store: LocalStore) -> None:
    kept(store, [0, 1])
    kept(store, [2, 3, 4], group_id="gbig", group_size=3)
    kept(store, [6, 7])
    assert taken(store, rows=4) == ["x0", "x1"]  # g3 would fit, but may not overtake
    assert taken(store, "b2", rows=4, max_staleness=5) == ["x3", "x4", "x2"]  # sample index 0, 1, 2


def test_a_group_larger_than_any_batch_is_an_error_that_names_it(store: LocalStore) -> None:
    kept(store, [0, 1, 2], group_size=3)
    with pytest.raises(StoreError, match=r"'g0' has 3 rows.*rows=2"):
        reserve(store, rows=2)
    assert store.batch_state().num_rows == 0


def test_nothing_is_reserved_below_the_least_number_of_rows(store: LocalStore) -> None:
    kept(store, [0, 1])
    before = store.version()
    assert reserve(store, min_rows=3) is None
    assert store.version() == before
    assert store.batch_state().num_rows == 0
    assert taken(store, min_rows=2) == ["x0", "x1"]


def test_a_row_without_a_verdict_or_a_held_one_keeps_its_group_waiting(store: LocalStore) -> None:
    store.append("rollouts", rollouts([0, 1, 2, 3]))
    store.append("decisions", table("decisions", [decision("x0"), decision("x2"), decision("x3", "hold")]))
    assert taken(store) == []
    store.append("decisions", decisions([1, 3], "reject", pass_id="p2"))
    assert taken(store) == ["x0", "x2"]


def test_a_group_with_only_rejected_rows_is_passed_over(store: LocalStore) -> None:
    store.append_all({"rollouts": rollouts([0, 1]), "decisions": decisions([0, 1], "reject")})
    kept(store, [2, 3])
    assert taken(store) == ["x2", "x3"]


def test_a_failed_row_never_trains_even_when_it_was_kept(store: LocalStore) -> None:
    rows = [rollout(0, error="timeout: 5 s"), rollout(1)]
    store.append_all({"rollouts": table("rollouts", rows), "decisions": decisions([0, 1])})
    assert taken(store) == ["x1"]


def test_a_failed_row_counts_as_present_once_it_is_rejected(store: LocalStore) -> None:
    rows = [rollout(0, error="timeout: 5 s"), rollout(1)]
    store.append_all({"rollouts": table("rollouts", rows), "decisions": decisions([1])})
    assert taken(store) == []
    store.append("decisions", decisions([0], "reject"))
    assert taken(store) == ["x1"]


@pytest.mark.parametrize(("incomplete", "rows"), [("wait", []), ("drop", []), ("use", ["x0", "x1"])])
def test_a_group_with_missing_siblings_follows_the_policy(store: LocalStore, incomplete: str, rows: list[str]) -> None:
    kept(store, [0, 1], group_size=3)
    assert taken(store, incomplete=incomplete) == rows
    verdicts = store.table("decisions").filter(store_filter("reader")).to_pylist()
    if incomplete == "drop":
        assert [(row["experience_id"], row["reason"], row["detail"]) for row in verdicts] == [
            ("x0", "incomplete", "2 of 3 siblings"), ("x1", "incomplete", "2 of 3 siblings"),
        ]  # fmt: skip
        assert store.rollout_state().column("status").to_pylist() == ["rejected", "rejected"]
    else:
        assert verdicts == []
    assert store.verify() == []


def test_a_waiting_group_is_taken_when_its_sibling_arrives(store: LocalStore) -> None:
    kept(store, [0, 1], group_size=3)
    assert taken(store) == []
    kept(store, [2], group_size=3)
    assert taken(store) == ["x0", "x1", "x2"]


def test_two_segments_of_one_sample_do_not_stand_in_for_a_missing_sibling(store: LocalStore) -> None:
    turns = [rollout(0), rollout(5, group_id="g0", task_id="t0", sample_index=0, turn_index=1)]
    store.append_all({"rollouts": table("rollouts", turns), "decisions": decisions([0, 5])})
    assert taken(store) == []


def test_held_rows_of_an_incomplete_group_are_not_dropped(store: LocalStore) -> None:
    store.append_all({"rollouts": rollouts([0], group_size=2), "decisions": decisions([0], "hold")})
    assert taken(store, incomplete="drop") == []
    assert store.rollout_state().column("status").to_pylist() == ["held"]


def test_stale_groups_are_rejected_by_the_reader_and_the_next_one_is_taken(store: LocalStore) -> None:
    kept(store, [0], model_version=3)
    kept(store, [1], model_version=1)
    kept(store, [2, 3], model_version=2)
    before = store.version()
    reservation = reserve(store, version=4, max_staleness=2)
    assert reservation is not None
    assert reservation.experience_ids == ("x2", "x3")
    assert store.version() == before + 1  # one transaction for verdicts and reservation
    stale = store.table("decisions").filter(store_filter("reader")).to_pylist()
    assert [(row["experience_id"], row["verdict"], row["reason"], row["detail"]) for row in stale] == [
        ("x0", "reject", "stale", "token version 1, weights 4, limit 2"),
        ("x1", "reject", "stale", "token version 1, weights 4, limit 2"),
    ]
    assert store.rollout_state().column("status").to_pylist() == ["rejected", "rejected", "kept", "kept"]
    assert store.verify() == []


def test_stale_groups_are_rejected_even_when_nothing_is_left_to_take(store: LocalStore) -> None:
    kept(store, [0, 1], model_version=0)
    assert reserve(store, version=1, max_staleness=0) is None
    assert store.rollout_state(status="rejected").num_rows == 2
    assert reserve(store, version=1, max_staleness=0) is None
    assert store.table("decisions").num_rows == 4


def test_rows_without_a_model_are_never_stale(store: LocalStore) -> None:
    kept(store, [0, 1], model_version=None)
    assert taken(store, version=100, max_staleness=0) == ["x0", "x1"]


def test_evaluation_rows_and_other_runs_are_not_taken(store: LocalStore) -> None:
    kept(store, [0, 1], partition="eval")
    kept(store, [2, 3], run_id="other")
    assert taken(store) == []
    assert taken(store, "b2", run_id="other") == ["x2", "x3"]


def test_max_uses_lets_a_row_train_that_often_and_no_more(store: LocalStore) -> None:
    kept(store, [0, 1])
    kept(store, [2, 3])
    assert train(store, "b1", 1, rows=2, max_uses=2) == ["x0", "x1"]
    assert train(store, "b2", 2, rows=2, max_uses=2) == ["x0", "x1"]
    assert train(store, "b3", 3, rows=2, max_uses=2) == ["x2", "x3"]
    assert train(store, "b4", 4, rows=2, max_uses=1) == []
    state = store.rollout_state().to_pylist()
    assert [(row["uses"], row["trained_step"]) for row in state] == [(2, 2), (2, 2), (1, 3), (1, 3)]
    assert store.verify() == []


def test_a_trained_row_that_grows_stale_is_passed_over_and_not_rejected(store: LocalStore) -> None:
    kept(store, [0, 1])
    train(store, "b1", 1, max_uses=2)
    assert taken(store, "b2", version=5, max_uses=2, max_staleness=1) == []
    assert store.rollout_state().column("status").to_pylist() == ["kept", "kept"]


def test_an_expired_reservation_is_free_again_and_a_prepared_one_is_not(store: LocalStore) -> None:
    kept(store, [0, 1])
    assert taken(store, "b1", lease=0.0) == ["x0", "x1"]
    prepared = reserve(store, "b2", lease=60.0)
    assert prepared is not None
    assert prepared.experience_ids == ("x0", "x1")
    assert [(one.batch_id, one.status) for one in store.batches("run")] == [("b1", "released"), ("b2", "reserved")]
    batch, rows = manifest("b2", 1, prepared.experience_ids)
    store.prepare_batch(prepared, step=1, batch=batch, rows=rows)
    store._catalog.read()  # the lease is over; only the manifest holds the rows now
    with store._catalog.transaction("age the lease") as connection:
        connection.execute("UPDATE batches SET expires_at = 0")
    assert taken(store, "b3") == []


def test_reserving_a_batch_again_returns_the_same_rows(store: LocalStore) -> None:
    kept(store, [0, 1, 2, 3])
    assert taken(store, rows=2) == ["x0", "x1"]
    assert taken(store, rows=2) == ["x0", "x1"]
    assert taken(store, rows=4, version=1) == ["x0", "x1", "x2", "x3"]  # other weights: chosen anew
    with pytest.raises(StoreError, match="'run'"):
        reserve(store, run_id="other")


def test_opening_a_run_frees_what_its_dead_process_had_reserved(store: LocalStore) -> None:
    kept(store, [0, 1])
    assert taken(store) == ["x0", "x1"]
    with store.open_run("other"):
        assert taken(store, "b2") == []
    with store.open_run("run"):
        assert taken(store, "b2") == ["x0", "x1"]


def store_filter(operator: str):
    import pyarrow.compute as pc

    return pc.field("operator") == operator


def test_any_mix_of_groups_is_taken_whole_once_and_in_order() -> None:
    @settings(max_examples=examples(25), deadline=None)
    @given(
        st.lists(
            st.tuples(st.integers(1, 3), st.lists(st.sampled_from(["keep", "reject", "hold"]), max_size=3)), max_size=6
        ),
        st.integers(3, 7),
    )
    def holds(groups: list[tuple[int, list[str]]], limit: int) -> None:
        import tempfile

        expected: list[list[str]] = []
        rows, verdicts, number = [], [], 0
        for at, (size, given_verdicts) in enumerate(groups):
            names: list[str] = []
            for sample, verdict in enumerate(given_verdicts[:size]):
                changes = {"group_id": f"g{at}", "task_id": f"t{at}", "sample_index": sample, "group_size": size}
                rows.append(rollout(number) | changes)
                verdicts.append(decision(f"x{number}", verdict))
                names += [f"x{number}"] if verdict == "keep" else []
                number += 1
            if len(given_verdicts[:size]) == size and "hold" not in given_verdicts[:size] and names:
                expected.append(names)
        with tempfile.TemporaryDirectory() as folder, open_store(Path(folder) / "s", durability="process") as store:
            store.append_all({"rollouts": table("rollouts", rows), "decisions": table("decisions", verdicts)})
            got: list[str] = []
            for step in range(1, 20):
                ids = train(store, f"b{step}", step, rows=limit)
                assert len(ids) <= limit
                got += ids
            assert got == [one for names in expected for one in names]
            assert store.verify() == []

    holds()
