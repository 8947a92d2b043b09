-- What went into each operator of each curation pass and where it came out, exactly as stored.
SELECT * FROM raw.operator_runs
