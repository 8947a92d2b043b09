"""Worker processes: a hanging or dying row costs itself only."""

from __future__ import annotations

import os
import time

import pytest

from buffer_engine.errors import OperatorError
from operators.workers import Died, TimedOut, WorkerPool


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_replies_keep_the_order_and_bad_rows_cost_only_themselves():
    pool = WorkerPool("sleepy_worker", workers=2, timeout_seconds=1.0)
    try:
        start = time.monotonic()
        replies = pool.map([{"do": word} for word in ("a", "sleep", "b", "end", "c", "d")])
        assert time.monotonic() - start < 15
        assert isinstance(replies[1], TimedOut)
        assert isinstance(replies[3], Died)
        assert [replies[place]["value"] for place in (0, 2, 4, 5)] == ["a", "b", "c", "d"]
        assert pool.map([]) == []
        (again,) = pool.map([{"do": "e"}])
        assert again["value"] == "e"
    finally:
        pool.close()
    assert not alive(again["pid"])


def test_a_worker_that_cannot_start_is_an_error_and_not_a_wait():
    pool = WorkerPool("no_such_worker_module", workers=1, timeout_seconds=1.0)
    with pytest.raises(OperatorError, match="ended with code 1 at its start"):
        pool.map([{"do": "a"}])
