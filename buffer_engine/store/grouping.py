"""Appends of several threads that wait for the catalog at the same time, handed to one of them to do together.

Whoever gets the catalog's lock takes everything that waits; the others find their append done when their turn comes.
Small appends then share one sync and one transaction, and nobody ever waits for company: an append that is alone is
done alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from buffer_engine.store.base import AppendReceipt
from buffer_engine.store.refusal import Refusals
from buffer_engine.store.staging import Staged

MOST_TOGETHER = 64
"""Appends in one transaction; bounds how long the first of them waits for the rest."""


@dataclass(slots=True, eq=False)
class Request:
    """One append: valid rows, cursors to move, how many rows were given per table, and how it ended.

    Attributes:
        run_id: run of the events about refused rows.
        refusals: collects bad rows; None: the first one refuses the append.
    """

    staged: list[Staged]
    moved: Mapping[str, int]
    given: Mapping[str, int]
    run_id: str = ""
    refusals: Refusals | None = None
    receipt: AppendReceipt | None = field(default=None, init=False)
    failure: Exception | None = field(default=None, init=False)

    @property
    def done(self) -> bool:
        """Whether its caller can be answered."""
        return self.receipt is not None or self.failure is not None


class Queue:
    """Requests of a process that nobody has begun with yet."""

    def __init__(self, lock: threading.RLock) -> None:
        """`lock` is held by whoever serves."""
        self._serving = lock
        self._guard = threading.Lock()
        self._waiting: list[Request] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request, serve: Callable[[Sequence[Request]], None]) -> AppendReceipt:
        """Have `request` done, by this thread together with others' or by another thread.

        Args:
            serve: gives each request a receipt or a failure.
        """
        with self._guard:
            self._waiting.append(request)
        with self._serving:
            while not request.done:
                with self._guard:
                    taken = self._waiting[:MOST_TOGETHER]
                    del self._waiting[:MOST_TOGETHER]
                try:
                    serve(taken)
                finally:  # interrupted: whoever comes next goes on with what is left
                    left = [one for one in taken if not one.done and one is not request]
                    if left:
                        with self._guard:
                            self._waiting[:0] = left
        if request.failure is not None:
            raise request.failure
        assert request.receipt is not None
        return request.receipt
