from __future__ import annotations

from collections.abc import Iterator

import pytest
from inspect_sample import sample_tables

from buffer_engine.inspect import Inspection, connect


@pytest.fixture(scope="module")
def sample() -> Iterator[Inspection]:
    """The hand-written run of `inspect_sample`, ready for questions."""
    with connect(sample_tables()) as inspection:
        yield inspection
