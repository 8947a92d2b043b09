-- Every verdict ever given, exactly as stored.
SELECT * FROM raw.decisions
