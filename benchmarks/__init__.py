"""Benchmarks: part of the source tree, not of the installed package."""
