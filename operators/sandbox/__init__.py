"""Programs that nobody has read, run where they can do no harm: see `operators.sandbox.running.Sandbox`."""
