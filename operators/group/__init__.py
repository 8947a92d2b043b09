"""Operators that judge whole groups."""
