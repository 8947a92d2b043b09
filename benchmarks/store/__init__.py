"""The store beside its peers: the same rows, one run, one table."""
