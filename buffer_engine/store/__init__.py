"""The experience store: append-only Arrow logs, a SQLite catalog as commit point, reservations and batches."""
