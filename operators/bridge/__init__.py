"""Operators of other packages, run at arm's length."""
