"""Several processes write one store at once, and compete for the same rows."""

from __future__ import annotations

from pathlib import Path

from store_rows import decisions, rollouts
from store_workload import fast_processes, reserve_all, write_alone

from buffer_engine.store import open_store

WRITERS = 4


def run_together(target: object, arguments: list[tuple[object, ...]]) -> list[int | None]:
    context = fast_processes()
    children = [context.Process(target=target, args=one) for one in arguments]  # pyright: ignore[reportArgumentType]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    return [child.exitcode for child in children]


def test_four_writers_lose_and_double_nothing_even_when_they_write_the_same_keys(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    # nobody has created the store yet: the four race for that too
    assert run_together(write_alone, [(str(folder), worker, 25) for worker in range(1, WRITERS + 1)]) == [0] * WRITERS
    with open_store(folder) as store:
        own = {f"x{1_000_000 * worker + number}" for worker in range(1, WRITERS + 1) for number in range(25)}
        shared = {f"x{500 + number}" for number in range(25)}
        ids = store.table("rollouts", columns=["experience_id"]).column(0).to_pylist()
        assert len(ids) == len(set(ids)) == 125
        assert set(ids) == own | shared
        assert store.version() == WRITERS * 25
        assert [store.cursor(f"w{worker}") for worker in range(1, WRITERS + 1)] == [25] * WRITERS
        assert store.rollout_state().column("sequence").to_pylist() == list(range(1, 126))
        assert store.verify() == []


def test_competing_readers_never_get_the_same_row(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    with open_store(folder, durability="process") as store:
        store.append_all({"rollouts": rollouts(range(80)), "decisions": decisions(range(80))})
    assert run_together(reserve_all, [(str(folder), worker) for worker in range(3)]) == [0] * 3
    with open_store(folder) as store:
        rows = store.table("batch_rows", columns=["experience_id"]).column(0).to_pylist()
        assert sorted(rows) == sorted(f"x{number}" for number in range(80))
        assert store.rollout_state().column("uses").to_pylist() == [1] * 80
        assert store.verify() == []
