"""A rebuilt batch is the trained one, bit for bit, whatever was written since."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_rows import decisions, rollouts, score, table, task

from buffer_engine.errors import UsageError
from buffer_engine.store import open_store
from buffer_engine.store.base import ReadPolicy
from pipelines.batches import assemble_batch, build_manifest
from pipelines.cli.main import run_command
from pipelines.lineage.rebuild import column_digest, rebuild_batch, rows_digest
from trainers.algorithms.grpo import GRPO, GRPOConfig
from trainers.base import TrainBatch

Trained = tuple[Path, dict[int, TrainBatch]]


def test_a_rebuilt_batch_is_what_the_trainer_received(trained: Trained) -> None:
    folder, captured = trained
    assert len(captured) >= 3
    with open_store(folder, read_only=True) as store:
        for step, batch in captured.items():
            rebuilt = rebuild_batch(store, step=step, run_id="tiny")
            assert rebuilt.batch.rows.equals(batch.rows)
            assert rebuilt.batch.rows.schema.equals(batch.rows.schema)
            assert (rebuilt.batch.batch_id, rebuilt.batch.step, rebuilt.batch.model_version) == (
                batch.batch_id, batch.step, batch.model_version,
            )  # fmt: skip
            assert rebuilt.digest == rows_digest(batch.rows)
            assert any(any(mask) for mask in rebuilt.batch.rows.column("loss_mask").to_pylist())
        digests = {rebuild_batch(store, step=step, run_id="tiny").digest for step in captured}
        assert len(digests) == len(captured)


def test_the_command_writes_the_same_rows_and_says_their_digest(
    trained: Trained, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, captured = trained
    step, batch = next(iter(captured.items()))
    target = tmp_path / "batch.parquet"
    arguments = ["rebuild", str(folder), "--batch", str(step), "--run", "tiny"]
    assert run_command([*arguments, "--output", str(target)]) == 0
    out = capfd.readouterr().out
    assert f"digest {rows_digest(batch.rows)}" in out
    assert column_digest(batch.rows.column("token_ids")) in out
    written = pq.read_table(target)
    assert rows_digest(written) == rows_digest(batch.rows)
    assert written.schema.metadata[b"batch_id"] == f"tiny/{step}".encode()
    assert [entry.name for entry in tmp_path.iterdir()] == ["batch.parquet"]
    assert run_command([*arguments, "--output", "batch.csv"]) == 2
    assert "ends in .parquet" in capfd.readouterr().err


def test_a_step_that_is_not_there_or_not_one_is_told(trained: Trained) -> None:
    folder, captured = trained
    with open_store(folder, read_only=True) as store:
        with pytest.raises(UsageError, match="exists in several runs: tiny, tiny-2; choose one with --run"):
            rebuild_batch(store, step=min(captured))
        with pytest.raises(UsageError, match="no batch of run 'tiny' has step 99; there are tiny: steps"):
            rebuild_batch(store, step=99, run_id="tiny")


def test_a_mask_counts_for_a_batch_exactly_when_it_came_before_the_manifest(tmp_path: Path) -> None:
    """Four rows of four tokens, two of them sampled; x1 is masked before the manifest is written, x2 after."""
    algorithm = GRPO(GRPOConfig())
    policy = ReadPolicy(rows=4)
    with open_store(tmp_path / "s", durability="process") as store:
        store.append("tasks", table("tasks", [task("t0")]))
        store.append_all(
            {
                "rollouts": rollouts(range(4), group_size=4),
                "scores": table("scores", [score(f"x{number}", float(number % 2)) for number in range(4)]),
                "decisions": decisions(range(4)),
            }
        )
        store.append("decisions", decisions([1], "mask", operator="cut"))
        reservation = store.reserve(policy, run_id="run", batch_id="run/1", model_version=0)
        assert reservation is not None
        manifest = build_manifest(
            store, reservation, step=1, algorithm=algorithm, policy=policy, config_hash="c", seed=0
        )
        assert manifest.batch.column("trained_tokens").to_pylist() == [6]
        first = assemble_batch(store, manifest.batch, manifest.rows)
        store.prepare_batch(reservation, step=1, batch=manifest.batch, rows=manifest.rows)
        store.append("decisions", decisions([2], "mask", operator="cut"))
        store.commit_batch("run/1", step=1)
        rebuilt = rebuild_batch(store, step=1)
        assert rebuilt.batch.rows.equals(first.rows)
        on, off = [False, False, True, True], [False] * 4
        assert rebuilt.batch.rows.column("loss_mask").to_pylist() == [on, off, on, on]
        assert rebuilt.batch.rows.column("advantages").to_pylist()[1] == [0.0] * 4


def test_a_digest_tells_values_apart_and_nothing_else() -> None:
    lists = pa.chunked_array([[[1, 2], [3]], [[], None]], pa.list_(pa.int32()))
    same = pa.chunked_array([[[9], [1, 2], [3], [], None]], pa.list_(pa.int32())).slice(1)
    assert column_digest(lists) == column_digest(same)
    others = ([[1], [2, 3], [], None], [[1, 2], [3], None, []], [[1, 2], [3], [], []], [[1, 2], [4], [], None])
    digests = {column_digest(pa.chunked_array([other], pa.list_(pa.int32()))) for other in others}
    assert len(digests | {column_digest(lists)}) == 5
    written = (["ab", ""], ["a", "b"], ["ab", None])
    texts = [column_digest(pa.chunked_array([values], pa.string())) for values in written]
    assert len(set(texts)) == 3
    floats = [column_digest(pa.chunked_array([[value]], pa.float64())) for value in (0.0, -0.0, None, 1e-300)]
    assert len(set(floats)) == 4
