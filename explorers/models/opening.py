"""From a model's configuration to a running engine."""

from __future__ import annotations

from explorers.base import Engine
from explorers.models.base import ModelConfig
from explorers.registry import MODELS


def open_engine(config: ModelConfig) -> Engine:
    """Load the model that `config` describes.

    Raises:
        ModelError: the model is missing or cannot be loaded.
        MissingExtraError: its library is not installed.
    """
    engine: Engine = MODELS.load(config.type)(config)
    return engine
