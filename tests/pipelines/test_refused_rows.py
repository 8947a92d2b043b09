"""A specification decides what a bad row from the explorer does: it stops the run, or is left out and counted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from store_rows import rollout, score, table

from buffer_engine.errors import SchemaError
from buffer_engine.store import open_store
from buffer_engine.store.base import OnInvalid, Partition
from explorers.base import Chunk, GroupPlan
from pipelines.exploration import explore_groups


class OneBadRow:
    """An explorer whose only chunk has a row with a mask of another length than its tokens."""

    async def explore(
        self, groups: Sequence[GroupPlan], *, run_id: str, step: int, partition: Partition, start_chunk: int = 0
    ) -> AsyncIterator[Chunk]:
        if start_chunk == 0:
            rows = [rollout(n, loss_mask=[True] if n == 1 else [False, False, True, True]) for n in range(4)]
            scores = [score(f"x{n}") for n in range(4)]
            yield Chunk(0, table("rollouts", rows), table("scores", scores), table("events", []), generated_tokens=8)


@pytest.mark.parametrize("on_invalid", ["refuse_all", "refuse_rows"])
def test_a_bad_row_of_a_chunk_stops_the_run_or_is_left_out(tmp_path: Path, on_invalid: OnInvalid) -> None:
    with open_store(tmp_path / "store", durability="process") as store:

        def explore() -> None:
            explore_groups(
                store, OneBadRow(), [], run_id="run", step=1, partition="train", chunk_cursor="chunks",
                done_cursors={"done": 1}, on_chunk=lambda chunk: None, record=False, on_invalid=on_invalid,
            )  # fmt: skip

        if on_invalid == "refuse_all":
            with pytest.raises(SchemaError, match="experience_id='x1': loss_mask has length 1"):
                explore()
            assert (store.table("rollouts").num_rows, store.cursor("chunks"), store.cursor("done")) == (0, 0, 0)
            return
        explore()
        explore()  # a resumed run asks for the chunk that comes next and counts nothing again
        assert store.table("rollouts").column("experience_id").to_pylist() == ["x0", "x2", "x3"]
        assert store.table("scores").column("experience_id").to_pylist() == ["x0", "x2", "x3"]
        events = store.table("events", columns=["kind", "experience_id"]).to_pylist()
        assert events == [{"kind": "refused_row", "experience_id": "x1"}] * 2  # the rollout, and the score about it
        assert (store.cursor("chunks"), store.cursor("done")) == (1, 1)
        assert store.verify() == []
