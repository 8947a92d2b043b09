"""Operators that shape the reward out of what was measured."""
