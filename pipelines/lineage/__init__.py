"""Lineage: what a training batch was, what it would have been, and scores that come late."""
