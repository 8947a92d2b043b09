"""Dry runs: a pipeline over stored rows, what it would do to them, and nothing written."""
