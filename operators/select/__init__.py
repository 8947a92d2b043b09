"""Operators that choose rows by a query."""
