"""Names of the store's cursors that say how far a run has come.

A cursor moves in the same transaction as the rows it accounts for, so after a crash it tells exactly which part of a
step is done. Every phase of the loop asks its cursor first and skips what is there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunCursors:
    """Cursor names of one run."""

    run_id: str

    @property
    def explorations(self) -> str:
        """Finished explorations of the whole run: the index that the task sampler is asked for next."""
        return f"{self.run_id}/explorations"

    def explored(self, step: int) -> str:
        """Finished explorations of one loop step (more than one when filters left too little)."""
        return f"{self.run_id}/explored/{step}"

    def chunks(self, step: int, refill: int) -> str:
        """Chunks appended of one exploration."""
        return f"{self.run_id}/chunks/{step}/{refill}"

    @property
    def passes(self) -> str:
        """Finished curation passes."""
        return f"{self.run_id}/passes"

    def evaluated(self, step: int) -> str:
        """1 once the evaluation after this step is stored."""
        return f"{self.run_id}/evaluated/{step}"

    def evaluation_chunks(self, step: int) -> str:
        """Chunks appended of the evaluation after this step."""
        return f"{self.run_id}/evaluation_chunks/{step}"

    def imported(self, source: str) -> str:
        """Chunks of an import that are stored."""
        return f"{self.run_id}/imported/{source}"

    def import_done(self, source: str) -> str:
        """1 once an import is complete."""
        return f"{self.run_id}/import_done/{source}"

    def skipped(self, step: int) -> str:
        """1 when the step had nothing to train on and was passed over."""
        return f"{self.run_id}/skipped/{step}"

    @property
    def weights_saved(self) -> str:
        """Weight version of the final weights on disk."""
        return f"{self.run_id}/weights_saved"

    @property
    def started(self) -> str:
        """1 once the run exists in the store."""
        return f"{self.run_id}/started"

    @property
    def finished(self) -> str:
        """1 once the run has done all its steps."""
        return f"{self.run_id}/finished"
