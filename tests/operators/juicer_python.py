"""The interpreter that has Data-Juicer, for the tests that run it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from explorers.package_data import cache_directory
from operators.bridge.juicer_env import interpreter

FOLDER = cache_directory() / "juicer"


def juicer_python() -> Path:
    """The interpreter; skips the test where there is none."""
    found = interpreter(FOLDER)
    if found is None and importlib.util.find_spec("data_juicer") is None:
        pytest.skip(f"Data-Juicer is not there: python -m operators.bridge.juicer_env {FOLDER} (make juicer)")
    return found or Path(sys.executable)
