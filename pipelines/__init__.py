"""Pipelines: YAML to specification to plan to a running assembly, and the command line."""
