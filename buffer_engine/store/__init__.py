"""The experience store: append-only Arrow logs, a SQLite catalog as commit point, reservations and batches."""

from buffer_engine.store.local import LocalStore, open_store

__all__ = ["LocalStore", "open_store"]
