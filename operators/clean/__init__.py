"""Operators that mend text."""
