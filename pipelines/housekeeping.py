"""Keeping a store small while a run goes on: compaction and retention every few steps, beside the loop.

One thread at a time does both, so that no step waits for it; what a run still needs is not touched. When a step comes
that should start it again and it has not ended, that turn is left out: the next one does the work of both.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from buffer_engine.config import ComponentConfig
from buffer_engine.errors import StoreBusyError
from buffer_engine.store.base import ExperienceStore
from buffer_engine.store.compact import GRACE_SECONDS, Compaction
from buffer_engine.store.erase import EraseRule, Erasure
from pipelines.retention import AGE, parse_age, replayed_after
from pipelines.rows import event_row


class CompactSection(ComponentConfig):
    """Moving rows that training wants no more into Parquet files, half as large, while the run goes on."""

    every_steps: int = Field(default=10, gt=0, description="optimizer steps between two turns; also done at the end")
    grace_seconds: float = Field(
        default=GRACE_SECONDS, ge=0, description="how long old files stay for readers of an earlier moment"
    )


class RetainSection(ComponentConfig):
    """A rule by which texts, tokens and log-probs of rollouts are erased for good; a record of each stays."""

    rejected_older_than: str | None = Field(
        default=None, description=f"rejected rows by the age of their verdict: {AGE}; null: not these"
    )
    trained_steps_ago: int | None = Field(
        default=None, gt=0, description="rows last trained more than so many steps ago; null: not these"
    )
    reason: str = Field(min_length=1, description="why, for the record")

    @field_validator("rejected_older_than")
    @classmethod
    def _is_age(cls, value: str | None) -> str | None:
        if value is not None:
            parse_age(value)
        return value

    @model_validator(mode="after")
    def _one_choice(self) -> Self:
        """A rule names rows in one way.

        Raises:
            PydanticCustomError: of type `misfit`, with the field and what to write.
        """
        if (self.rejected_older_than is None) == (self.trained_steps_ago is None):
            raise PydanticCustomError(
                "misfit",
                "{said}: {fix}",
                {
                    "field": "rejected_older_than",
                    "said": "a rule names rows by `rejected_older_than` or by `trained_steps_ago`",
                    "fix": "write one of the two, and another rule for the other",
                },
            )
        return self

    def rule(self, run_id: str, step: int) -> EraseRule | None:
        """The rule after optimizer step `step`; None while no row can be old enough."""
        if self.rejected_older_than is not None:
            seconds, versions = parse_age(self.rejected_older_than)
            return EraseRule(rejected_seconds=seconds, rejected_versions=versions, run_id=run_id)
        assert self.trained_steps_ago is not None
        before = step - self.trained_steps_ago
        return EraseRule(trained_before_step=before, run_id=run_id) if before > 1 else None


class Housekeeper:
    """Compaction and retention of one run's store."""

    def __init__(
        self,
        store: ExperienceStore,
        folder: Path,
        run_id: str,
        *,
        compact: CompactSection | None,
        retain: tuple[RetainSection, ...],
        max_uses: int,
    ) -> None:
        """Do nothing when `compact` is None.

        Args:
            max_uses: batches that the run trains a row in.
        """
        self._store = store
        self._folder = folder
        self._run_id = run_id
        self._compact = compact
        self._retain = retain
        self._max_uses = max_uses
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._last = 0

    def after_step(self, step: int) -> None:
        """Begin a turn when one is due and the last has ended.

        Raises:
            BufferEngineError: the last turn failed; nothing is lost by it.
        """
        self._last = step
        if self._compact is None or (self._thread is not None and self._thread.is_alive()):
            return
        self._settle()
        if step % self._compact.every_steps == 0:
            self._thread = threading.Thread(target=self._turn, args=(step,), name="housekeeping")
            self._thread.start()

    def finish(self) -> None:
        """A last turn, after which nothing runs any more.

        Raises:
            BufferEngineError: it or the one before failed; nothing is lost by it.
        """
        if self._compact is not None:
            self._settle()
            self._turn(self._last)
            self._settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for what runs; after a run that went well, do a last turn."""
        if kind is None:
            self.finish()
        elif self._thread is not None:
            self._thread.join()

    def _settle(self) -> None:
        """Wait for the turn that runs, and raise what it failed with."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _turn(self, step: int) -> None:
        assert self._compact is not None
        try:
            replays = replayed_after(self._store, self._folder) if self._retain else {}
            for section in self._retain:
                rule = section.rule(self._run_id, step)
                if rule is not None:
                    self._note_erasure(step, self._erase(rule, section.reason, replays), rule)
            done = self._store.compact(grace_seconds=self._compact.grace_seconds, max_uses=self._max_uses)
            self._note_compaction(step, done)
        except StoreBusyError as busy:  # a person compacts by hand: the next turn does what is left
            self._store.append("events", event_row(self._run_id, step, "housekeeping_left_out", 1, str(busy)))
        except BaseException as failure:  # noqa: BLE001 - raised again by the loop's thread
            self._failure = failure

    def _erase(self, rule: EraseRule, reason: str, replays: Mapping[str, int]) -> Erasure:
        assert self._compact is not None
        return self._store.erase(
            rule,
            reason=reason,
            author=f"run {self._run_id}",
            max_uses=self._max_uses,
            replays=replays,
            grace_seconds=self._compact.grace_seconds,
        )

    def _note_erasure(self, step: int, done: Erasure, rule: EraseRule) -> None:
        if done.rows:
            detail = f"{rule.text}: {done.tokens} tokens, {done.bytes} bytes"
            self._store.append("events", event_row(self._run_id, step, "erased", done.rows, detail))

    def _note_compaction(self, step: int, done: Compaction) -> None:
        if done.rows:
            detail = f"{done.bytes_before} bytes became {done.bytes_after}; {done.removed} old files removed"
            self._store.append("events", event_row(self._run_id, step, "compacted", done.rows, detail))
        for message in done.damaged:
            self._store.append("events", event_row(self._run_id, step, "damaged_frame", 1, message))
