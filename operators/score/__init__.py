"""Operators that measure an answer: each writes one component."""
