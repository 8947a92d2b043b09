"""The experience store: append-only Arrow logs, a SQLite catalog as commit point, reservations and batches."""

from buffer_engine.store.local import LocalStore
from buffer_engine.store.opening import open_store
from buffer_engine.store.pressure import BackPressure

__all__ = ["BackPressure", "LocalStore", "open_store"]
