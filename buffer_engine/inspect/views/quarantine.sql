-- Damaged record batches: their rows are missing from every other view until the file is repaired.
SELECT * FROM raw.quarantine
