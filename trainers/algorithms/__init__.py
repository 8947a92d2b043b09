"""Algorithms: pure losses over the tokens of a batch, and what they need of it."""
