"""Operators that compare rows with each other and with the past."""
