"""The `buffer-engine` command line, one module per verb."""
