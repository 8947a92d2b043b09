"""Operators that make new rows out of old ones."""
