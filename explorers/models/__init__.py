"""Models that explorers talk to. Importing this package imports no model library."""
