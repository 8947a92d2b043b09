-- Damaged record batches: their rows are missing from every other view until the file is repaired.
--   frame_id: record batch, in the order of commit
--   table_name: table whose rows it holds
--   segment: file below `segments`
--   offset: where it begins: bytes, or rows in a Parquet file
--   rows: rows that are missing
--   found_at: when the damage was met
--   message: what is wrong with it
SELECT * FROM raw.quarantine
