-- What each optimizer step used, row by row, exactly as stored.
SELECT * FROM raw.batch_rows
