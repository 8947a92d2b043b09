"""The state of rollouts and batches as of any version is what was seen at that version."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pyarrow as pa
import pytest
from store_rows import decisions, manifest, model, rollout, rollouts, table, task

from buffer_engine.inspect import connect_store
from buffer_engine.store import open_store
from buffer_engine.store.base import ExperienceStore, ReadPolicy, Reservation

GROUPS = 24


def seen(store: ExperienceStore) -> tuple[pa.Table, pa.Table]:
    return store.rollout_state(), store.batch_state()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_earlier_version_shows_the_state_that_was_there_then(tmp_path: Path, seed: int) -> None:
    random_turn = random.Random(seed)
    policy = ReadPolicy(rows=4, max_uses=2, max_staleness=6)
    with open_store(tmp_path / "s", durability="process") as store:
        store.append("tasks", table("tasks", [task(f"t{number}") for number in range(GROUPS)]))
        history: dict[int, tuple[pa.Table, pa.Table]] = {}
        made, batches, step, undone = 0, 0, 0, 0
        held: list[tuple[Reservation, bool]] = []
        for turn in range(140):
            choice = random_turn.random()
            if choice < 0.25 and made < 2 * GROUPS:
                store.append("rollouts", rollouts([made, made + 1]))
                made += 2
            elif choice < 0.5 and made:
                verdict = random_turn.choice(["keep", "keep", "keep", "reject", "hold", "release", "mask"])
                chosen = random_turn.sample(range(made), min(made, 4))
                store.append("decisions", decisions(chosen, verdict, pass_id=f"p{turn}"))
            elif choice < 0.65:
                lease = 0.0 if random_turn.random() < 0.2 else 3600.0
                reservation = store.reserve(
                    policy, run_id="run", batch_id=f"b{batches}", model_version=step, lease_seconds=lease
                )
                batches += 1
                if reservation is not None and lease:
                    held.append((reservation, False))
            elif held:
                at = random_turn.randrange(len(held))
                reservation, prepared = held[at]
                if not prepared:
                    step += 1
                    # a row that turned out to be unusable is given back
                    wanted = reservation.experience_ids[: random_turn.choice([1, 2, 4])]
                    batch, rows = manifest(reservation.batch_id, step, wanted)
                    store.prepare_batch(reservation, step=step, batch=batch, rows=rows)
                    held[at] = (reservation, True)
                elif random_turn.random() < 0.7:
                    of = {record.batch_id: record.step for record in store.batches("run")}[reservation.batch_id]
                    assert of is not None
                    store.commit_batch(reservation.batch_id, step=of, model=model(of) if turn % 2 else None)
                    del held[at]
                else:
                    store.release(reservation.batch_id)
                    undone += 1
                    del held[at]
            history[store.version()] = seen(store)
        statuses = {record.status for record in store.batches("run")}
        assert {"committed", "released"} <= statuses
        assert undone
        for version, (rollout_state, batch_state) in history.items():
            assert store.rollout_state(until=version).equals(rollout_state), version
            assert store.batch_state(until=version).equals(batch_state), version
            for status in ("kept", "rejected"):
                of_status = rollout_state.filter(pa.compute.equal(rollout_state.column("status"), status))
                assert store.rollout_state(until=version, status=status).equals(of_status)


def test_an_expired_reservation_was_held_until_somebody_found_out(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", durability="process") as store:
        store.append("tasks", table("tasks", [task("t0")]))
        store.append_all({"rollouts": rollouts([0, 1]), "decisions": decisions([0, 1])})
        store.reserve(ReadPolicy(rows=2), run_id="run", batch_id="b1", model_version=0, lease_seconds=0.0)
        first = store.version()
        time.sleep(0.01)
        store.reserve(ReadPolicy(rows=2), run_id="run", batch_id="b2", model_version=0)
        assert store.rollout_state(until=first).column("reserved_by").to_pylist() == ["b1", "b1"]
        assert store.rollout_state().column("reserved_by").to_pylist() == ["b2", "b2"]
        assert store.batch_state(until=first).column("status").to_pylist() == ["reserved"]
        assert store.batch_state().column("status").to_pylist() == ["released", "reserved"]


def test_sql_shows_status_uses_and_step_of_then_and_books_that_balance(tmp_path: Path) -> None:
    """Two groups: the first trains at step 1, then the second is rejected, and the first trains again at step 2."""
    policy = ReadPolicy(rows=2, max_uses=2)
    question = "SELECT experience_id, status, uses, trained_step, fate FROM experiences ORDER BY 1"
    with open_store(tmp_path / "s", durability="process") as store:
        store.append("tasks", table("tasks", [task("t0"), task("t1")]))
        store.append_all(
            {"rollouts": table("rollouts", [rollout(n) for n in range(4)]), "decisions": decisions([0, 1])}
        )
        kept = store.version()
        for step in (1, 2):
            reservation = store.reserve(policy, run_id="run", batch_id=f"b{step}", model_version=step - 1)
            assert reservation is not None
            batch, rows = manifest(f"b{step}", step, reservation.experience_ids)
            store.prepare_batch(reservation, step=step, batch=batch, rows=rows)
            prepared = store.version()
            store.commit_batch(f"b{step}", step=step, model=model(step))
            if step == 1:
                first_prepared, trained = prepared, store.version()
                store.append("decisions", decisions([2, 3], "reject", operator="dedup"))
        for version, expected in {
            kept: [("x0", "kept", 0, None, "kept"), ("x2", "new", 0, None, "new")],
            first_prepared: [("x0", "kept", 0, None, "reserved"), ("x2", "new", 0, None, "new")],
            trained: [("x0", "kept", 1, 1, "trained"), ("x2", "new", 0, None, "new")],
            store.version(): [("x0", "kept", 2, 2, "trained"), ("x2", "rejected", 0, None, "rejected")],
        }.items():
            with connect_store(store, until=version) as inspection:
                rows = [tuple(row.values()) for row in inspection.rows(question)]
                assert [row for row in rows if row[0] in ("x0", "x2")] == expected
                assert inspection.rows("FROM conservation WHERE NOT balanced") == []
                committed = inspection.rows("SELECT count(*) AS n FROM batches WHERE status = 'committed'")
                assert committed == [{"n": expected[0][2]}]
