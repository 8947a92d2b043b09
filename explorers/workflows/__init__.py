"""How one attempt at a task is played."""
