"""Scoring stored rows again with an operator, in parts that survive a kill."""
