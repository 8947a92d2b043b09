"""Operators that take rows out by what can be measured on the row itself."""
