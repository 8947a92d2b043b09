"""Fixtures that several areas share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from servers import S3_ENVIRONMENT

# As the command line does: threads that spin while they wait starve each other on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.update(S3_ENVIRONMENT)  # before any server of processes is started, which hands its environment on


@pytest.fixture(scope="module", params=["local", pytest.param("shared", marks=pytest.mark.shared)])
def backend(request: pytest.FixtureRequest):
    """Runs a module once with everything in a folder, once with PostgreSQL and an object store; see `backends`."""
    import backends

    backends.choose(request.param)
    yield request.param
    backends.choose("local")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in a Hugging Face folder."""
    from tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests about files or statements of one machine are left out where the store is shared."""
    for item in items:
        about = item.get_closest_marker("only_local")
        if about is not None and item.get_closest_marker("shared") is not None:
            item.add_marker(pytest.mark.skip(reason=f"one machine only: {about.args[0]}"))
