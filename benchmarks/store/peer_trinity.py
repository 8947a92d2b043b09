"""Trinity-RFT's SQLite experience storage, its own code: one row of metadata and one pickled experience per rollout.

It is used without Ray, in this process, which is its quickest way. It has neither reads by id nor late scores: a batch
is its own read (least used first, newest first) put into tensors by its own functions, a late score is an UPDATE of
its reward column through its engine.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from sqlalchemy import bindparam, update
from trinity.buffer.storage.sql import SQLExperienceStorage
from trinity.common.config import StorageConfig
from trinity.common.experience import EID, Experience, gather_action_masks, gather_response_attrs, gather_token_ids

from benchmarks.store.peers import Padded, Unsupported


class TrinitySQL:
    """`SQLExperienceStorage` with an event loop of its own."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "rows.db"
        # Other writers lock the whole file; with its default of three tries four writers lose experiences.
        config = StorageConfig(
            name="rollouts", path=f"sqlite:///{self._file}", schema_type="experience", wrap_in_ray=False,
            batch_size=256, max_retry_times=100, max_read_timeout=60,
        )  # fmt: skip
        self._loop = asyncio.new_event_loop()
        self._storage = SQLExperienceStorage(config)
        self._loop.run_until_complete(self._storage.prepare())
        for logger in [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]:
            logger.setLevel(logging.ERROR)  # a line per write would be measured as well

    def prepare(self, rows: pa.Table) -> list[Experience]:
        """Its experiences: what its workflows hand over."""
        return [_experience(row) for row in rows.to_pylist()]

    objects = prepare

    def append(self, prepared: list[Experience]) -> None:
        """One write."""
        self._loop.run_until_complete(self._storage.write(prepared))

    append_objects = append

    def score(self, scores: pa.Table) -> None:
        """Its rewards overwritten, found by the message id, which it indexes."""
        table = self._storage.table_model_cls.__table__
        change = update(table).where(table.c.msg_id == bindparam("key")).values(reward=bindparam("score"))
        found = zip(scores.column("experience_id").to_pylist(), scores.column("value").to_pylist(), strict=True)

        async def work() -> None:
            async with self._storage.engine.begin() as connection:
                await connection.execute(change, [{"key": key, "score": score} for key, score in found])

        self._loop.run_until_complete(work())

    reward = score

    def batch(self, ids: list[str]) -> Padded:
        """Its own read of as many rows, its own tensors."""
        found = self._loop.run_until_complete(self._storage.read(len(ids)))
        prompt = max(one.prompt_length for one in found)
        response = max(len(one.tokens) - one.prompt_length for one in found)
        return {
            "token_ids": gather_token_ids(found, prompt, response, 0).numpy(),
            "loss_mask": gather_action_masks(found, response).numpy(),
            "logprobs": gather_response_attrs(found, "logprobs", response).numpy(),
        }

    def group_by(self) -> list[tuple[object, ...]]:
        """By model version only: nothing else of it is a column."""
        with sqlite3.connect(self._file) as connection:
            return connection.execute("SELECT model_version, count(*) FROM rollouts GROUP BY 1").fetchall()

    def count(self) -> int:
        """SQL."""
        with sqlite3.connect(self._file, timeout=60) as connection:
            return int(connection.execute("SELECT count(*) FROM rollouts").fetchone()[0])

    def ids(self) -> list[str]:
        """The message ids."""
        with sqlite3.connect(self._file) as connection:
            return [row[0] for row in connection.execute("SELECT msg_id FROM rollouts")]

    def keep(self, ids: list[str]) -> None:
        """It trains on whatever it has."""

    def take(self, rows: int, number: int, who: str) -> list[str]:
        """Its own read, which counts the rows as consumed; the payload comes along."""
        return [one.eid.suffix for one in self._loop.run_until_complete(self._storage.read(rows))]

    def compact(self) -> None:
        """Not there."""
        raise Unsupported("no such operation")

    def close(self) -> None:
        """Release the engine."""
        self._loop.run_until_complete(self._storage.engine.dispose())
        self._loop.close()


def _experience(row: dict[str, Any]) -> Experience:
    prompt = row["prompt_length"]
    return Experience(
        eid=EID(batch=row["explore_step"], task=row["task_id"], run=row["sample_index"], suffix=row["experience_id"]),
        tokens=torch.tensor(row["token_ids"], dtype=torch.int32),
        logprobs=torch.tensor(row["logprobs"][prompt:], dtype=torch.float32),
        prompt_length=prompt,
        reward=0.0,
        messages=[{"role": one["role"], "content": one["content"]} for one in row["messages"]],
        info={"model_version": row["model_version"]},
    )
