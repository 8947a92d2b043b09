"""The store that the overhead of a step is compared with must answer the loop as the real one does."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from store_rows import decisions, manifest, model, rollouts, score, table

from benchmarks.memory_store import MemoryStore
from benchmarks.step_overhead import Account, Watched, lines
from buffer_engine.errors import StoreError
from buffer_engine.store import open_store
from buffer_engine.store.base import ExperienceStore, ReadPolicy

FIFO = ReadPolicy(type="fifo", rows=3)


def filled(store: ExperienceStore) -> None:
    """Four groups of two: the first kept, the second half rejected, the third failed in part, the fourth held."""
    store.append("rollouts", rollouts([0, 1]))
    store.append_all({"rollouts": rollouts([2, 3]), "scores": table("scores", [score("x2"), score("x0", 0.5)])})
    failed = rollouts([4, 5]).to_pylist()
    failed[1] |= {"error": "timeout: late", "stop_reason": "error"}
    store.append("rollouts", table("rollouts", failed), cursors={"explored": 7})
    store.append("rollouts", rollouts([6, 7]))
    store.append("decisions", decisions([0, 1, 2, 4, 5]))
    store.append("decisions", decisions([3], "reject"))
    store.append("decisions", decisions([6, 7], "hold"))


def story(store: ExperienceStore) -> list[Any]:
    """What the loop would see, step by step."""
    filled(store)
    seen: list[Any] = [store.cursor("explored"), store.cursor("other"), store.rollout_state(run_id="run").to_pylist()]
    seen.append(store.fetch(["x5", "x0", "x3"]).to_pylist())
    seen.append(store.fetch(["x1"], columns=["group_id", "token_ids"]).to_pylist())
    seen += [store.narrow("scores", ["x0", "x2"]).to_pylist(), store.narrow("decisions", ["x3"]).to_pylist()]
    seen += [store.narrow("scores", ["x7"]).to_pylist(), dict(store.runs_of(["x0", "y"]))]
    first = store.reserve(FIFO, run_id="run", batch_id="run/1", model_version=0)
    assert first is not None
    seen.append(first.experience_ids)
    store.release("run/1")
    first = store.reserve(FIFO, run_id="run", batch_id="run/2", model_version=0)
    assert first is not None
    batch, rows = manifest("run/2", 1, first.experience_ids[:2])
    store.prepare_batch(first, step=1, batch=batch, rows=rows)
    store.commit_batch("run/2", step=1, model=model(1))
    seen.append([(one.batch_id, one.status, one.step) for one in store.batches("run")])
    second = store.reserve(FIFO, run_id="run", batch_id="run/3", model_version=1)
    assert second is not None
    seen += [second.experience_ids, store.reserve(FIFO, run_id="run", batch_id="run/4", model_version=1)]
    seen += [store.rollout_state().to_pylist(), store.rollout_state(status="held").to_pylist()]
    seen += [store.table(name).to_pylist() for name in ("rollouts", "batches", "batch_rows", "models", "events")]
    seen.append(pa.Table.from_batches(store.scan("rollouts", columns=["experience_id"])).to_pylist())
    seen.append(store.reserve(FIFO, run_id="other", batch_id="other/1", model_version=0))
    return seen


def test_the_memory_store_tells_the_story_of_the_real_store(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", durability="process") as real:
        wanted = story(real)
    found = story(MemoryStore(tmp_path))
    for at, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one == other, f"answer {at}"
    assert found[9] == ("x0", "x1", "x2")  # x4 does not fit any more, the held group is not ready
    assert found[11] == ("x2", "x4")  # x2 was freed when the manifest left it out; x5 failed


def test_every_method_takes_what_the_protocol_says() -> None:
    for name, method in inspect.getmembers(MemoryStore, inspect.isfunction):
        if not name.startswith("_"):
            wanted = inspect.signature(getattr(ExperienceStore, name)).parameters
            assert list(inspect.signature(method).parameters) == list(wanted), name


def test_what_the_loop_does_not_need_is_refused(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path)
    filled(store)
    with pytest.raises(NotImplementedError):
        store.reserve(ReadPolicy(type="newest"), run_id="run", batch_id="b", model_version=0)
    with pytest.raises(NotImplementedError):
        store.table("rollouts", until=1)
    with pytest.raises(StoreError, match="has rollout 'x0' already"):
        store.append("rollouts", rollouts([0]))


def test_time_inside_the_store_counts_once_and_scans_are_read_inside(tmp_path: Path) -> None:
    class Slow(MemoryStore):
        def append_all(self, tables: Any, *, cursors: Any = None) -> Any:
            time.sleep(0.02)
            return super().append_all(tables, cursors=cursors)

        def scan(self, table: str, **asked: Any) -> Any:
            time.sleep(0.02)
            yield from super().scan(table, **asked)

    account = Account()
    store: Any = Watched(Slow(tmp_path), account)
    store.append("rollouts", rollouts([0, 1]))
    assert account.wall >= 0.02
    assert account.calls == {"append": account.wall}  # and not `append_all`, which it calls, once more
    walked = store.scan("rollouts")
    assert account.calls["scan"] >= 0.02
    assert sum(batch.num_rows for batch in walked) == 2
    assert store.path == tmp_path


def test_the_share_of_a_step_is_the_time_inside_over_the_time_of_the_step() -> None:
    def step(seconds: float, inside: float) -> dict[str, Any]:
        return {
            "seconds": seconds, "cpu": seconds / 2, "store": inside, "store_cpu": inside / 2, "calls": {"fetch": inside}
        }  # fmt: skip

    found = {"memory": [step(10.0, 0.01)], "process": [step(10.2, 0.11)], "power": [step(10.4, 0.21)]}
    text = "\n".join(lines(found))
    # process: 0.11 / 10.2 of the step, 0.055 / 5.1 of its CPU, (0.11 - 0.01) / 10 more than memory
    assert (
        "| durability process (the default of a run) | 10.20 | 5.10 | +2.0% | 110.0 | 55.0 | 1.08% | 1.08% | +1.00% |"
        in text
    )
    assert "fetch 110.0" in text
