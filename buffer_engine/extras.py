"""Optional dependencies: imported where used, with the exact install line when they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from buffer_engine.errors import MissingExtraError


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, which the extra `extra` brings.

    Raises:
        MissingExtraError: it is not installed. An ImportError from inside an installed module is not hidden.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            raise MissingExtraError.of(module, extra) from error
        raise
