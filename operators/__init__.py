"""Operators: pure functions from a frame of rollouts to scores, verdicts and derived columns."""
